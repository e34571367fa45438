"""Drafters around other drafters: merged trees and grammar guidance."""
