"""What of a drafted tree is kept: the seam (`base`) and one file for every rule."""
