// Tables in a box of class "ledger": a click on a column's name sorts by it, typed words filter the rows.

// the number of "1,234", "1e-05", and of a mean as in "0.400 (0.100 to 0.900)"; of words NaN
const number = (text) => parseFloat(/^-?[\d.,]+(e[-+]?\d+)?(?= \(|, |$)/.exec(text)?.[0].replaceAll(",", ""));
const made = (tag, attributes) => Object.assign(document.createElement(tag), attributes);

for (const box of document.querySelectorAll(".ledger")) {
  const table = box.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const words = made("input", { type: "search", placeholder: "words that a row must have" });
  const title = box.closest("section")?.querySelector("h1, h2, h3")?.firstChild.textContent ?? "the table";
  words.ariaLabel = `filter ${title}`;
  const shown = made("output", {});
  const frame = made("div", { className: "rows", tabIndex: 0, role: "region", ariaLabel: title });
  frame.append(table);
  box.replaceChildren(words, shown, frame);

  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;

  // whichever way: last comes what is empty, and a word where others have numbers, which says why there is none
  const compare = (sign, counts) => (first, second) => {
    const missing = (text) => (counts ? Number.isNaN(number(text)) : text === "");
    const difference = counts ? number(first) - number(second) : first.localeCompare(second, "en", { numeric: true });
    return missing(first) - missing(second) || sign * difference || 0;
  };

  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };

  heads.forEach((head, column) => {
    const button = made("button", { type: "button", textContent: head.textContent });
    head.scope = "col";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = sign === 1 ? "ascending" : "descending";
      const said = rows.map((row) => value(row, column)).filter((text) => text !== "");
      const order = compare(sign, 2 * said.filter((text) => !Number.isNaN(number(text))).length > said.length);
      rows.sort((a, b) => order(value(a, column), value(b, column)));
      body.append(...rows);
    });
  });

  words.addEventListener("input", filter);
  filter();
}
