// The theme: as the system has it until somebody presses the button. Reports and the explorer share it.

/** Show the theme and follow it; `changed(theme)` draws what colours alone do not change. */
function startTheme(changed) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)"), toggle = document.getElementById("theme");
  let theme = dark.matches ? "dark" : "light", chosen = false;
  const show = () => {
    document.documentElement.dataset.theme = theme;
    toggle.setAttribute("aria-pressed", String(theme === "dark"));
    toggle.textContent = `Theme: ${theme}`;
    changed(theme);
  };
  toggle.addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    chosen = true;
    show();
  });
  dark.addEventListener("change", () => {
    if (chosen) return;
    theme = dark.matches ? "dark" : "light";
    show();
  });
  show();
}
