// A form whose answer follows what is filled in. Python is loaded when the reader first changes something.
(() => {
  const here = document.currentScript.src;
  const form = document.querySelector("form.live");
  const shown = document.getElementById("answer");
  const status = document.getElementById("status");
  const say = (words) => { status.textContent = words; };
  if (location.protocol === "file:") {
    say("This page was opened as a file, and a browser starts no Python there. In the folder of the site type: " +
      "python -m http.server, and open the address that it prints. Below stands the answer to what is filled in now.");
    return;
  }
  let worker = null, busy = false, waiting = null, asked = 0, timer = 0;
  const values = () => Object.fromEntries(new FormData(form));
  const send = () => {
    if (busy || !waiting) return;
    busy = true;
    worker.postMessage(waiting);
    waiting = null;
  };
  const hear = ({ data }) => {
    if (data.broken) { busy = false; return say(`Python could not answer: ${data.broken}`); }
    if (data.ready) { busy = false; say("Thinking …"); return send(); }
    busy = false;
    if (data.id === asked) {
      say(data.refused ? data.refused : "Computed in this page, by labkit's planner.");
      status.classList.toggle("refused", Boolean(data.refused));
      if (data.answer) shown.innerHTML = data.answer;
      shown.dataset.id = data.id;
    }
    send();
  };
  const ask = () => {
    asked += 1;
    waiting = { id: asked, page: form.dataset.page, values: values() };
    if (!worker) {
      busy = true;
      say("Loading Python, 13 MB, once …");
      worker = new Worker(new URL("worker.mjs", here), { type: "module" });
      worker.onmessage = hear;
      worker.onerror = () => say("Python could not be loaded. Below stands the last answer.");
    } else if (!busy) say("Thinking …");
    send();
  };
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); ask(); });
})();
