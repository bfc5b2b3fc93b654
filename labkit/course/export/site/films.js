// Plays the stored films of a page by the widget's own script (film_player.js). Without it, and on paper, their pictures
// stay. The frames are packed by labkit/course/widgets/packed.py, and are taken apart here in the same way.
"use strict";

async function unpacked(word) {
  const bytes = Uint8Array.from(atob(word), (letter) => letter.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")); // zlib's format
  const { pieces, frames } = await new Response(inflated).json();
  return frames.map((steps) => {
    let place = -1;
    return steps.map((step) => pieces[(place += step)]).join("");
  });
}

async function play(figure) {
  const { film, name, at, words } = figure.dataset;
  const frames = await unpacked(film);
  const stage = document.createElement("div");
  const [, width] = /viewBox="0 0 ([\d.]+)/.exec(frames[0]) || [];
  stage.style.setProperty("--drawn-width", `${width || 600}px`); // in a narrow window no drawing is wider than drawn
  figure.prepend(stage);
  filmPlayer.render({ model: pageModel({ frames, name, words: JSON.parse(words), step: Number(at) }), el: stage });
  figure.classList.add("plays"); // site.css hides the picture
}

// an old browser without DecompressionStream keeps the pictures
if ("DecompressionStream" in window) document.querySelectorAll("figure[data-film]").forEach(play);
