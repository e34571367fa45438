"""Models behind one seam: a slot holds a committed prefix and a tentative tree."""
