// Tables in a box of class "ledger": a click on a column's name sorts by it, typed words filter the rows.
const number = (text) => Number(text.replaceAll(",", ""));
const made = (tag, attributes) => Object.assign(document.createElement(tag), attributes);

for (const box of document.querySelectorAll(".ledger")) {
  const table = box.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const words = made("input", { type: "search", placeholder: "words that a row must have" });
  words.ariaLabel = `filter ${box.id || "the table"}`;
  const shown = made("output", {});
  const frame = made("div", { className: "rows", tabIndex: 0 });
  frame.append(table);
  box.replaceChildren(words, shown, frame);

  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;

  const compare = (first, second) => {
    if (first === "" || second === "") return (first === "") - (second === "");
    const difference = number(first) - number(second);
    return Number.isNaN(difference) ? first.localeCompare(second, "en", { numeric: true }) : difference;
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
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = sign === 1 ? "ascending" : "descending";
      rows.sort((a, b) => sign * compare(value(a, column), value(b, column)));
      body.append(...rows);
    });
  });

  words.addEventListener("input", filter);
  filter();
}
