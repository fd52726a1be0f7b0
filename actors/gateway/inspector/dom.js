// Makes elements. Texts are only ever set as text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an HTML element with these attributes, listeners (`onclick`) and children. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Return an SVG element. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Put these children in place of those that an element has. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(3).filter(Boolean));
}

/** Call the function at most once a frame. */
export function eachFrame(act) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      act();
    });
  };
}

/** Call the function once no call has come for so many milliseconds. */
export function whenQuiet(ms, act) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...args), ms);
  };
}
