from setuptools import Extension, setup

import pagedkv

setup(
    name="ownpages",
    ext_modules=[
        Extension(
            "ownpages",
            ["ownpages.c"],
            include_dirs=[pagedkv.get_include()],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Werror"],
        )
    ],
)
