from setuptools import Extension, setup

import pagedkv

setup(
    name="blobs",
    ext_modules=[
        Extension(
            "blobs",
            ["blobs.c"],
            include_dirs=[pagedkv.get_include()],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Werror"],
        )
    ],
)
