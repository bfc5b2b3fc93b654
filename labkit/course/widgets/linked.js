function render({ model, el }) {
  const draw = () => {
    el.innerHTML = model.get("value");
    lead(el, model.get("addresses"));
  };
  model.on("change:value", draw);
  draw();
  return () => model.off("change:value", draw);
}
export default { render };
