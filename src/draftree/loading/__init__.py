"""From a name, folder or file to a model behind the model seam."""
