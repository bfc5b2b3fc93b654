"""JupyterLab: starting it, trying it without a browser, where the labs lie and whose copies they are."""
