"""The engine on its own thread, for asyncio."""
