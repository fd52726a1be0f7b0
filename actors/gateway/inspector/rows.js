// A list of any length, with elements only for the rows in sight.
//
// `height` fixes the height of each row. Without it, rows have the height of their content: a row
// that was never in sight counts with `guess`, and is measured when it comes into sight. The row at
// the top stays where it is, whatever is measured or added above it.

import { eachFrame, h } from "./dom.js";

const OVERSCAN_PX = 240;
let lists = 0;

export class Rows extends HTMLElement {
  #count = 0;
  #height;
  #guess;
  #sticks;
  #render;
  #heights = new Float64Array(0);
  #tops = new Float64Array(1);
  #shown = new Map();
  #active = -1;
  #space = h("div.rows-space", { role: "presentation" });
  #sizes = new ResizeObserver((entries) => this.#measured(entries));
  #own = new ResizeObserver(() => this.#resized());
  #name = `rows${(lists += 1)}`;
  #isDirty = false;
  #isAtEnd = true;
  #room = 0; // the height of the list; 0 while it is hidden
  #place = 0; // where the list was scrolled to when it was last in sight
  #wanted = null; // a row to reveal once the list is in sight

  /**
   * `render(index)` returns a row's `content`, and `data` for the dataset of the row itself.
   * A list that `sticks` stays at its end once it is scrolled there.
   */
  constructor({ height = null, guess = 64, sticks = false, label, render }) {
    super();
    this.#height = height;
    this.#guess = guess;
    this.#sticks = sticks;
    this.#render = render;
    this.ariaLabel = label;
  }

  connectedCallback() {
    if (!this.#space.parentNode) {
      this.append(this.#space);
      this.role = "listbox";
      this.tabIndex = 0;
      const draw = eachFrame(() => this.#draw());
      this.addEventListener("scroll", () => {
        if (!this.#room) return;
        this.#place = this.scrollTop;
        this.#noteEnd();
        draw();
      }, { passive: true });
      this.addEventListener("keydown", (event) => this.#key(event));
      this.addEventListener("click", (event) => this.#click(event));
    }
    this.#own.observe(this);
  }

  disconnectedCallback() {
    this.#own.disconnect();
    this.#room = 0;
  }

  get count() {
    return this.#count;
  }

  set count(count) {
    if (count === this.#count) return;
    const before = this.#count;
    this.#count = count;
    if (this.#height === null) {
      const heights = new Float64Array(count).fill(this.#guess);
      heights.set(this.#heights.subarray(0, Math.min(before, count)));
      this.#heights = heights;
      this.#sum();
    }
    for (const [index, row] of this.#shown) if (index >= count) this.#drop(index, row);
    for (const row of this.#shown.values()) row.ariaSetSize = count;
    if (this.#active >= count) this.#active = -1;
    this.#draw();
    if (this.#sticks && this.#isAtEnd) this.toEnd();
  }

  get isAtEnd() {
    return this.#isAtEnd;
  }

  set active(index) {
    this.#mark(this.#active, false);
    this.#active = index;
    this.#mark(index, true);
  }

  refresh(index = null) {
    if (index === null) this.#isDirty = true;
    else if (this.#shown.has(index)) this.#fill(index, this.#shown.get(index));
    this.#draw();
  }

  toEnd() {
    this.#wanted = null;
    this.#isAtEnd = true;
    this.#size(); // else the browser stops at the height that the list had before
    this.scrollTop = this.#total();
    this.#draw();
  }

  /** Scroll so that a row is in sight; `block` "center" puts it in the middle. */
  reveal(index, block = "nearest") {
    if (index < 0 || index >= this.#count) return;
    if (!this.clientHeight) {
      this.#wanted = [index, block];
      this.#isAtEnd = false;
      return;
    }
    const top = this.#top(index);
    const bottom = this.#top(index + 1);
    const room = this.clientHeight;
    if (block === "center") this.scrollTop = top - (room - (bottom - top)) / 2;
    else if (top < this.scrollTop) this.scrollTop = top;
    else if (bottom > this.scrollTop + room) this.scrollTop = bottom - room;
    this.#place = this.scrollTop;
    this.#noteEnd();
    this.#draw();
  }

  get range() {
    return [this.#at(this.scrollTop), this.#at(this.scrollTop + this.clientHeight)];
  }

  /** Draw. A list that comes into sight stands where it stood, as the browser forgets it. */
  #resized() {
    const wasHidden = !this.#room;
    this.#room = this.clientHeight;
    if (!this.#room) return;
    const wanted = this.#wanted;
    this.#wanted = null;
    if (wanted) return this.reveal(...wanted);
    if (this.#sticks && this.#isAtEnd) return this.toEnd();
    if (wasHidden) {
      this.#size();
      this.scrollTop = this.#place;
    }
    this.#draw();
  }

  // By the heights as measured: the browser's has rows that have grown since. A list that has become
  // lower since it was scrolled to its end is still there: `#resized` comes after this, and goes on.
  #noteEnd() {
    const room = Math.max(this.#room, this.clientHeight);
    this.#isAtEnd = this.scrollTop + room >= this.#total() - 4;
  }

  #total() {
    return this.#top(this.#count);
  }

  #top(index) {
    return this.#height === null ? this.#tops[index] : index * this.#height;
  }

  #at(y) {
    if (this.#height !== null) return clamp(Math.floor(y / this.#height), 0, this.#count - 1);
    let low = 0;
    let high = this.#count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#tops[middle + 1] <= y) low = middle + 1;
      else high = middle;
    }
    return clamp(low, 0, this.#count - 1);
  }

  #sum() {
    const tops = new Float64Array(this.#count + 1);
    for (let n = 0, y = 0; n < this.#count; n += 1) tops[n + 1] = y += this.#heights[n];
    this.#tops = tops;
  }

  #measured(entries) {
    let isChanged = false;
    const anchor = this.#at(this.scrollTop);
    const below = this.scrollTop - this.#top(anchor);
    for (const { target } of entries) {
      const index = target.index;
      const height = target.offsetHeight;
      if (this.#shown.get(index) !== target || !height || this.#heights[index] === height) continue;
      this.#heights[index] = height;
      isChanged = true;
    }
    if (!isChanged) return;
    const wasAtEnd = this.#sticks && this.#isAtEnd;
    this.#sum();
    if (wasAtEnd) return this.toEnd();
    const top = this.#top(anchor) + below;
    this.#size();
    if (Math.abs(top - this.scrollTop) > 0.5) this.scrollTop = top;
    this.#draw();
  }

  #size() {
    this.#space.style.height = `${this.#total()}px`;
  }

  #draw() {
    if (!this.isConnected) return;
    this.#size();
    if (this.#count && this.clientHeight) {
      const first = this.#at(this.scrollTop - OVERSCAN_PX);
      const last = this.#at(this.scrollTop + this.clientHeight + OVERSCAN_PX);
      for (const [index, row] of this.#shown) {
        if ((index < first || index > last) && index !== this.#active) this.#drop(index, row);
      }
      for (let index = first; index <= last; index += 1) {
        let row = this.#shown.get(index);
        if (!row) row = this.#make(index);
        else if (this.#isDirty) this.#fill(index, row);
      }
      for (const [index, row] of this.#shown) {
        row.style.transform = `translateY(${this.#top(index)}px)`;
      }
      this.#isDirty = false;
      this.dispatchEvent(new CustomEvent("range", { detail: [first, last] }));
    }
  }

  #make(index) {
    const row = h("div", {
      role: "option",
      id: `${this.#name}-${index}`,
      "aria-posinset": index + 1,
      "aria-setsize": this.#count,
      "aria-selected": String(index === this.#active),
    });
    row.index = index;
    if (this.#height !== null) row.style.height = `${this.#height}px`;
    this.#fill(index, row);
    this.#shown.set(index, row);
    // for screen readers
    this.#space.insertBefore(row, [...this.#space.children].find((other) => other.index > index) ?? null);
    if (this.#height === null) this.#sizes.observe(row);
    return row;
  }

  #fill(index, row) {
    const { data, content } = this.#render(index);
    row.className = index === this.#active ? "row is-active" : "row";
    Object.assign(row.dataset, data);
    row.replaceChildren(content);
  }

  #drop(index, row) {
    this.#sizes.unobserve(row);
    row.remove();
    this.#shown.delete(index);
  }

  #mark(index, isActive) {
    const row = this.#shown.get(index);
    if (row) {
      row.classList.toggle("is-active", isActive);
      row.ariaSelected = isActive;
    }
    if (isActive) this.setAttribute("aria-activedescendant", index < 0 ? "" : `${this.#name}-${index}`);
  }

  /** Make a row the active one, because a person chose it. */
  choose(index, isOpened = false) {
    if (!this.#count) return;
    index = clamp(index, 0, this.#count - 1);
    if (!this.#shown.has(index)) this.#make(index);
    this.active = index;
    this.reveal(index);
    this.dispatchEvent(new CustomEvent("choose", { detail: { index, isOpened } }));
  }

  #click(event) {
    const row = event.target.closest(".row");
    if (row && !event.target.closest("a, button, input")) this.choose(row.index, true);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, this.range[1] - this.range[0] - 1);
    const moves = {
      ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page,
      Home: -this.#count, End: this.#count,
    };
    if (event.key in moves) {
      const from = this.#active < 0 ? (moves[event.key] > 0 ? this.range[0] - 1 : this.range[1]) : this.#active;
      this.choose(from + moves[event.key]);
    } else if (event.key === "Enter" && this.#active >= 0) {
      this.choose(this.#active, true);
    } else return;
    event.preventDefault();
  }
}

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

customElements.define("tk-rows", Rows);
