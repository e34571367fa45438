"""Models: the model seam and its implementations in torch and C."""
