"use strict";
// Plotly brings its own style elements: they get this page's nonce, as its policy asks.
{
  const { nonce } = document.currentScript, create = document.createElement;
  document.createElement = function (name, ...more) {
    const element = create.call(this, name, ...more);
    if (String(name).toLowerCase() === "style") element.nonce = nonce;
    return element;
  };
}
