"""Drafters around other drafters.

`ForcedTokenDrafter` adds what a grammar forces and removes what it forbids, `MergedDrafter` merges trees of several
drafters, `RoutedDrafter` gives each sequence the drafter of its request, and `AheadDrafter` drafts while the target
verifies. They have no specs of their own: whoever builds an engine applies them where they are needed.
"""
