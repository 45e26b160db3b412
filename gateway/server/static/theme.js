// Apply the colours that the user chose last, or the system's, before anything is drawn.
{
  const root = document.documentElement.dataset;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("gateway.theme");
    root.chosen = chosen === "light" || chosen === "dark" ? chosen : "system";
    root.theme = root.chosen === "system" ? (system.matches ? "dark" : "light") : root.chosen;
    document.dispatchEvent(new Event("gateway:theme"));
  };
  apply();
  system.addEventListener("change", apply);
  document.addEventListener("gateway:choose", apply);
}
