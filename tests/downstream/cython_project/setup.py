from Cython.Build import cythonize
from setuptools import Extension, setup

import pagedkv

setup(
    name="rows",
    ext_modules=cythonize(
        [Extension("rows", ["rows.pyx"], include_dirs=[pagedkv.get_include()])],
        language_level=3,
    ),
)
