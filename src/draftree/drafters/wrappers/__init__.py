"""Drafters around other drafters.

`MergedDrafter` merges the trees of several drafters, and `AheadDrafter` drafts while the target verifies. They have no
specs of their own: `build.build_drafter` applies them where a spec needs them.
"""
