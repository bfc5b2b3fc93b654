"""JupyterLab: starting it, testing it without a browser, finding the labs, and the learner's copies of them."""
