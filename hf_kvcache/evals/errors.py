"""What a measurement refuses: the message is one line for the terminal, and nothing is reported."""

from hf_kvcache.errors import KVCacheError


class EvalError(KVCacheError):
    """The inputs of a measurement are wrong or missing."""

    exit_code = 2


class SelfTestError(EvalError):
    """The measurement cannot see damage to the cache, or does not measure what it says: no number is reported."""

    exit_code = 1
