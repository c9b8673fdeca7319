// Makes the tables sortable. Everything on the page is there without this.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.value === undefined ? NaN : Number.parseFloat(cell.dataset.value);
    return Number.isNaN(number) ? null : number;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].filter((row) => !row.classList.contains("all"));
      const last = [...body.rows].filter((row) => row.classList.contains("all"));
      rows.sort((a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        // What is unknown comes last in either direction.
        if (x === null || y === null) return (x === null) - (y === null);
        return down ? y - x : x - y;
      });
      body.append(...rows, ...last);
    });
  });
}
