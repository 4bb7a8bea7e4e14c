"use strict";
(() => {
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  let choice = null;
  try { choice = localStorage.getItem("resumable-theme"); } catch { /* A frame in a notebook has no storage. */ }
  const chosen = () => choice || (prefersDark.matches ? "dark" : "light");

  function setTheme(name) {
    root.dataset.theme = name;
    root.style.colorScheme = name;
    theme.textContent = name === "dark" ? "Light" : "Dark";
    root.dispatchEvent(new Event("theme"));
  }

  theme.hidden = false;
  theme.addEventListener("click", () => {
    choice = chosen() === "dark" ? "light" : "dark";
    try { localStorage.setItem("resumable-theme", choice); } catch { /* See above. */ }
    setTheme(choice);
  });
  prefersDark.addEventListener("change", () => setTheme(chosen()));
  // On paper it is light.
  addEventListener("beforeprint", () => setTheme("light"));
  addEventListener("afterprint", () => setTheme(chosen()));
  setTheme(chosen());
})();
