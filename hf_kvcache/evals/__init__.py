"""Quality measured through the cache: perplexity, KL divergence, top-1 agreement, bytes."""
