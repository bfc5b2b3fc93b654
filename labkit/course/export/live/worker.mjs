// Python, in a thread of its own: a page never freezes while it thinks. One question at a time; the newest waits.
import { loadPyodide } from "../pyodide/pyodide.mjs";

const begun = (async () => {
  const python = await loadPyodide({ indexURL: new URL("../pyodide/", import.meta.url).href });
  const files = await fetch(new URL("labkit.zip", import.meta.url));
  if (!files.ok) throw new Error(`labkit.zip: ${files.status}`);
  python.unpackArchive(await files.arrayBuffer(), "zip");
  return python.runPython(`
import json
from labkit.course.export.live.answers import answer

def asked(page, values):
    try:
        return json.dumps({"answer": answer(page, json.loads(values))})
    except ValueError as error:
        return json.dumps({"refused": str(error)})

asked`);
})();

begun.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error) }));
onmessage = async ({ data }) => {
  const asked = await begun;
  try {
    postMessage({ id: data.id, ...JSON.parse(asked(data.page, JSON.stringify(data.values))) });
  } catch (error) {
    postMessage({ id: data.id, broken: String(error) });
  }
};
