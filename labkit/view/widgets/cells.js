// Names of cells become links. Each file that needs them is put behind this one: see linked.py.
// Where a cell ("03-12" of lab 03, "02·c25" which is c25 of lab 02, "10" a lab as a whole) is, seen from the notebook
// that JupyterLab shows: {path, id, url}; nothing outside of JupyterLab.
function place(cell, notebooks) {
  const here = location.pathname.match(/^(.*\/lab)(?:\/workspaces\/[^/]+)?\/tree\/(.*)$/);
  const file = notebooks[cell.slice(0, 2)];
  if (!here || !file || file.split("../").length > here[2].split("/").length) return null; // not on this server
  const path = new URL(file, `http://x/${here[2]}`).pathname.slice(1);
  const id = cell.length > 2 ? `#cell-id=${cell.split("·").pop()}` : "";
  return { path: decodeURIComponent(path), id, url: `${here[1]}/tree/${path}${id}` };
}

// Each <a data-cell> in `root` opens its lab there.
function lead(root, notebooks) {
  for (const link of root.querySelectorAll("a[data-cell]")) {
    const to = place(link.dataset.cell, notebooks);
    if (!to) continue;
    Object.assign(link, { href: to.url, target: "_blank", title: "open the lab at this cell" });
    link.style.color = "var(--jp-content-link-color, #0072b2)";
    link.addEventListener("click", (event) => {
      // where labkit has started JupyterLab, the lab opens beside this notebook, and else in a tab of the browser
      if (!window.jupyterapp || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      window.jupyterapp.commands.execute("rendermime:handle-local-link", { path: to.path, id: to.id });
    });
  }
}
