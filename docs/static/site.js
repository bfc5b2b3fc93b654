// What the theme leaves out: its two menus of a narrow window for the keyboard, and a search that works from a folder.

if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false; // browsers let no page read files

const MENUS = { __navigation: "Menu", __toc: "On this page" };

for (const [name, words] of Object.entries(MENUS)) {
  const state = document.getElementById(name);
  for (const label of document.querySelectorAll(`label[for="${name}"]:not(.overlay)`)) {
    const tell = () => label.setAttribute("aria-expanded", String(state.checked));
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    label.setAttribute("aria-label", words);
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      label.click();
    });
    state.addEventListener("change", tell);
    tell();
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.checked) state.click();
  });
}
