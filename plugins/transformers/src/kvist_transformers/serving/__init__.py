"""An OpenAI-compatible HTTP server on one engine: ``kvist serve``.

Needs the extra ``kvist-transformers[serve]``. One thread owns the engine (:mod:`.worker`); everything else runs in one
asyncio loop.
"""
