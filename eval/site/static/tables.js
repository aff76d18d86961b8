// Tables of class "ledger": a click on a column's name sorts by it, typed words filter the rows.
for (const box of document.querySelectorAll(".ledger")) {
  const body = box.querySelector("tbody");
  const rows = [...body.rows];
  const heads = [...box.querySelectorAll("th")];
  const words = box.querySelector("input");
  const shown = box.querySelector("output");

  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;

  const compare = (first, second) => {
    if (first === "" || second === "") return (first === "") - (second === "");
    const difference = Number(first) - Number(second);
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
    head.querySelector("button").addEventListener("click", () => {
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
