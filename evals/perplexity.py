"""Perplexity through the cache; the same as `hf-kvcache eval perplexity`. See `--help` and README.md in this folder."""

import sys

from hf_kvcache.evals.perplexity import main

if __name__ == "__main__":
    sys.exit(main())
