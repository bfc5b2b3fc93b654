// A widget's model on a page without a kernel, with anywidget's interface: values by name, and those who hear of changes.
"use strict";

function pageModel(values) {
  const hearers = new Map(); // "change:step" -> the functions that are called then
  return {
    get: (name) => values[name],
    set(name, value) {
      if (values[name] === value) return;
      values[name] = value;
      for (const hear of hearers.get(`change:${name}`) || []) hear();
    },
    save_changes() {}, // there is no kernel that would keep them
    on(event, hear) {
      hearers.set(event, [...(hearers.get(event) || []), hear]);
    },
    off(event, hear) {
      hearers.set(event, (hearers.get(event) || []).filter((other) => other !== hear));
    },
  };
}
