"""``python -m ssmzoo``, which ``accelerate launch -m ssmzoo train ...`` needs."""

import sys

from ssmzoo.cli.main import main

sys.exit(main())
