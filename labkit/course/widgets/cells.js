// Names of cells become links; each widget that needs them is put behind this file (linked.py). A name is "03-12", of
// lab 03; "02·c25", which is c25 of lab 02; or "10", a whole lab. `addresses` are those of the labs on the server.
function lead(root, addresses) {
  for (const link of root.querySelectorAll("a[data-cell]")) {
    const cell = link.dataset.cell;
    const lab = addresses[(/^\d\d[a-z]?/.exec(cell) || [""])[0]];
    if (!lab) continue; // no server shows it: the name stays a name
    const id = /[-·]/.test(cell) ? `#cell-id=${cell.split("·").pop()}` : "";
    const title = window.jupyterapp ? "open the lab at this cell" : "open the lab"; // a new tab begins at the top
    Object.assign(link, { href: lab + id, target: "_blank", title });
    link.style.color = "var(--jp-content-link-color, #0072b2)";
    link.addEventListener("click", (event) => {
      // where labkit has started JupyterLab, the lab opens beside this notebook, and else in a tab of the browser
      if (!window.jupyterapp || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      const path = decodeURIComponent(lab.split("/lab/tree/").pop());
      window.jupyterapp.commands.execute("rendermime:handle-local-link", { path, id });
    });
  }
}
