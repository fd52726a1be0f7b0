// Makes elements. All text is set as text, never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if ((value ?? false) === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (Array.isArray(value)) element.classList.add(...value.filter(Boolean));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => (child ?? false) !== false));
  return element;
}

/**
 * Return an HTML element. The arguments are its tag and classes ("p.quiet"), its attributes, further
 * classes (`{ class: ["is-line", isBad && "bad"] }`) and listeners (`{ onclick }`), if any, and
 * its children.
 */
export function h(tag, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  const isPlain = children[0]?.constructor === Object;
  return fill(element, isPlain ? children.shift() : {}, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replace the children of an element; the focus stays in its place. */
export function show(element, ...children) {
  const active = document.activeElement;
  const path = [];
  for (let at = element.contains(active) ? active : element; at !== element; at = at.parentElement) {
    path.unshift([...at.parentElement.children].indexOf(at));
  }
  element.replaceChildren(...children.flat(3).filter(Boolean));
  const there = path.reduce((at, index) => at?.children[index], element);
  if (there !== element && there?.tagName === active.tagName) there.focus({ preventScroll: true });
}

export function empty(title, ...children) {
  return h("div.empty", h("h2", title), children);
}

/** Return the notice that is shown until an answer has come; a quick one leaves it unseen. */
export function reading() {
  return h("p.reading.quiet", { role: "status" }, "Reading…");
}

/** Return a group of buttons, one of them pressed; `choices` are values and names. */
export function segments(label, choices, chosen, choose) {
  return h("div.segments", { role: "group", "aria-label": label }, choices.map(([value, name]) => h("button", {
    "aria-pressed": String(value === chosen), onclick: () => choose(value),
  }, name)));
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
