"""The engine on a thread of its own, for asyncio."""
