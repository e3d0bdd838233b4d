"""One model over several devices: what the mesh file says, how each parameter is cut, and putting the parts in place."""
