"""The only build logic: extension list, ISA flag table, debug and sanitizer switches.

Environment:
    PAGEDKV_DEBUG=1      asserts and the level 1 checker on every call (PKV_ASSERT), -O1 -g
    PAGEDKV_SANITIZE=X   -fsanitize=X on everything, with PAGEDKV_DEBUG's flags (address, undefined, thread)
    CFLAGS, LDFLAGS      appended by setuptools as usual

Building never looks at the build host's CPU: every ISA of the target architecture is compiled with its own flags and
chosen at run time.
"""

import os
import sys
import sysconfig
from itertools import takewhile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

X86_ISA_FLAGS = {
    "k_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "k_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
    "k_amx.c": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"],
    "k_vnni.c": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"],
}
ARM_ISA_FLAGS = {
    "k_neon.c": ["-march=armv8.2-a+fp16+dotprod"],
}
COMMON_SOURCES = ["cpu.c", "dispatch.c", "threads.c", "k_scalar.c"]
# Cython's output whose functions take a few nanoseconds: there a call inside costs as much as the work.
HOT_SOURCES = ["arena.c", "pages.c", "prefix.c", "sequence.c"]
# Contraction would fuse a*b+c behind the specification's back; -fno-math-errno lets sqrtf be one instruction.
STRICT_FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

# What the interpreter is built for, which a cross build says otherwise than the machine.
machine = sysconfig.get_platform().rpartition("-")[2]
isa_flags = (
    X86_ISA_FLAGS if machine in ("x86_64", "amd64") else ARM_ISA_FLAGS if machine in ("aarch64", "arm64") else {}
)
isa_flags = {name: flags for name, flags in isa_flags.items() if Path("csrc", name).exists()}

sanitize = os.environ.get("PAGEDKV_SANITIZE", "")
debug = bool(sanitize) or os.environ.get("PAGEDKV_DEBUG", "0") not in ("", "0")
flags = [*STRICT_FLAGS, *(["-O1", "-g", "-DPAGEDKV_DEBUG=1", "-fno-omit-frame-pointer"] if debug else ["-O2", "-g0"])]
link_flags = []
if sanitize:
    flags.append(f"-fsanitize={sanitize}")
    link_flags.append(f"-fsanitize={sanitize}")


class BuildExt(build_ext):
    """Adds each ISA file's own flags, warnings for our C only, and one clear line when there is no C compiler."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        compiler = self.compiler
        compile_one = compiler._compile

        def compile_with_isa_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            name = Path(src).name
            extra = [*extra_postargs, *isa_flags.get(name, [])]
            if Path(src).parent.name == "csrc":
                extra += ["-Wall", "-Wextra"] if debug else ["-Wall", "-Wextra", "-O3"]
            else:
                extra += ["-Wno-unused-function", "-Wno-cpp", *(["-O3"] if name in HOT_SOURCES and not debug else [])]
            compile_one(obj, src, ext, cc_args, extra, pp_opts)

        compiler._compile = compile_with_isa_flags
        super().build_extensions()
        self.record_build()

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        self.copy_file(str(Path(self.build_lib, "pagedkv", "build.json")), str(Path("pagedkv", "build.json")))

    def record_build(self):
        """Write what made this build into the package, for benchmark results and bug reports."""
        import json

        package = Path(self.build_lib, "pagedkv")
        package.mkdir(parents=True, exist_ok=True)
        words = getattr(self.compiler, "compiler_so", None) or ["cc"]
        record = {
            "commit": first_line("git", "rev-parse", "HEAD") if Path(".git").exists() else None,
            "compiler": first_line(*takewhile(lambda word: not word.startswith("-"), words), "--version"),
            "flags": " ".join([*flags, *os.environ.get("CFLAGS", "").split()]),
        }
        package.joinpath("build.json").write_text(json.dumps(record, indent=1) + "\n")


def first_line(*command):
    """The first line a command prints, None when it fails or prints nothing."""
    import subprocess

    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.partition("\n")[0].strip() or None


def require_c_compiler():
    """Exit with one line that says what is missing, before setuptools fails in the middle of a build."""
    import shlex
    import shutil

    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if not shutil.which(command):
        sys.exit(
            f"pagedkv: a C compiler is needed to build and '{command}' was not found; "
            "install gcc or clang (Debian/Ubuntu: apt install gcc python3-dev) or set CC"
        )


def extensions():
    """Every core/*.pyx is one extension; only core/_kernels links csrc.

    What an extension depends on also goes into a source distribution: the sources of every ISA, not of this machine's,
    and the .pxd files that are not installed.
    """
    not_compiled = [*Path("csrc").glob("*.c"), *Path("pagedkv", "core").glob("*.pxd")]
    headers = [*Path("csrc").glob("*.h"), *Path("pagedkv", "include", "pagedkv").glob("*.h")]
    found = []
    for path in sorted(Path("pagedkv", "core").glob("*.pyx")):
        csrc = [str(Path("csrc", name)) for name in [*COMMON_SOURCES, *isa_flags]] if path.stem == "_kernels" else []
        found.append(
            Extension(
                f"pagedkv.core.{path.stem}",
                [str(path), *csrc],
                include_dirs=["csrc", str(Path("pagedkv", "include"))],
                depends=sorted(str(path) for path in [*headers, *(not_compiled if csrc else [])]),
                define_macros=[(f"PKV_HAVE_{Path(name).stem[2:].upper()}", "1") for name in isa_flags],
                extra_compile_args=flags,
                extra_link_args=link_flags,
                libraries=["pthread", "m"],
            )
        )
    return found


if {"build_ext", "bdist_wheel", "build", "install", "develop", "editable_wheel"} & set(sys.argv):
    require_c_compiler()

if "sdist" in sys.argv or "egg_info" in sys.argv or "dist_info" in sys.argv or "--version" in sys.argv:
    ext_modules = extensions()
else:
    from Cython.Build import cythonize

    ext_modules = cythonize(
        extensions(),
        include_path=["."],
        compiler_directives={"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True,
                             "initializedcheck": False, "freethreading_compatible": True, "embedsignature": True,
                             "embedsignature.format": "python"},
        show_all_warnings=False,
    )

setup(ext_modules=ext_modules, cmdclass={"build_ext": BuildExt})
