"""`python -m pagedkv`."""

import sys

from pagedkv.cli import main

sys.exit(main())
