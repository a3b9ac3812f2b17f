/** The console: sign-in, menu, and the page of `location.hash`. */
import { ApiError, offline } from "./lib/api.js";
import { html, render, signal, useEffect, useState } from "./lib/html.js";
import { caller, endedBy, isOperator, mayCall, onDataPort, setTheme, signIn, signOut, theme } from "./lib/store.js";
import { ErrorBox, Field, Loading } from "./lib/ui.js";
import { pageAt, pages } from "./pages/index.js";

const hash = signal(location.hash);
window.addEventListener("hashchange", () => (hash.value = location.hash));

const NOT_LOADED = "The page could not be loaded. If the server was upgraded meanwhile, reload the console and sign in.";

/** @param {import("./pages/index.js").PageEntry} page */
function isFor(page) {
  return page.who !== "operator" || isOperator.value;
}

function SignIn() {
  const [secret, setSecret] = useState("");
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    setBusy(true);
    try {
      await signIn(secret);
    } catch (refused) {
      setError(refused);
      setBusy(false);
    }
  }

  const where = onDataPort
    ? html`An operator made it for you; it begins with <code>lpx_</code>. The quickstart's is in <code>data/quickstart-key</code>.
        The admin token works on the admin port only.`
    : html`The admin token is in the file <code>admin-token</code> of the server's data directory, unless
        <code>--admin-token</code> gave another. A key begins with <code>lpx_</code>.`;
  return html`<main class="sign-in">
    <h1>Loraplex</h1>
    ${endedBy.value && html`<p class="error" role="alert">${endedBy.value}</p>`}
    <form onSubmit=${onSubmit}>
      <${Field} label=${onDataPort ? "API key" : "Admin token or API key"}
        hint=${html`${where} It stays in this tab's memory: a reload asks for it again.`}>
        <input data-testid="secret" type="password" autocomplete="off" spellcheck=${false} required value=${secret}
          onInput=${(/** @type {any} */ event) => setSecret(event.target.value)} />
      <//>
      <button type="submit" class="primary" data-testid="sign-in" disabled=${busy}>Sign in</button>
    </form>
    ${error && html`<${ErrorBox} error=${error} />`}
  </main>`;
}

function Menu() {
  const found = pageAt(hash.value)?.page;
  const at = found?.under ?? found?.at.split("/")[0];
  return html`<nav class="menu" aria-label="Pages">
    ${pages.filter((page) => page.nav && isFor(page)).map(
      (page) => html`<a href=${`#/${page.at}`} data-testid=${page.testid}
        aria-current=${page.at === at ? "page" : undefined}>${page.nav}</a>`,
    )}
  </nav>`;
}

function Account() {
  const who = isOperator.value ? "Operator" : `${caller.value?.tenant} · ${caller.value?.key?.name ?? caller.value?.key?.id}`;
  return html`<div class="account">
    <span data-testid="who">${who}</span>
    <label><span class="hidden">Colours</span>
      <select data-testid="theme" value=${theme.value} onChange=${(/** @type {any} */ event) => setTheme(event.target.value)}>
        <option value="auto">System</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
    <button type="button" data-testid="sign-out" onClick=${() => signOut()}>Sign out</button>
  </div>`;
}

function CurrentPage() {
  const found = pageAt(hash.value);
  const [module, setModule] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [tries, setTries] = useState(0);
  const at = found?.page.at;
  useEffect(() => {
    let current = true;
    setError(null);
    found?.page.load().then(
      (loaded) => current && setModule({ at, show: loaded.default }),
      () => current && setError(new ApiError(0, "not_loaded", NOT_LOADED)),
    );
    return () => {
      current = false;
    };
  }, [at, tries]);
  if (error) return html`<${ErrorBox} error=${error} retry=${() => setTries(tries + 1)} />`;
  if (!module || module.at !== at) return html`<${Loading} />`;
  return html`<${module.show} key=${hash.value} ...${found?.params} />`;
}

function App() {
  const inMenu = pages.filter((page) => page.nav && isFor(page));
  const first = inMenu.find((page) => !page.scope || mayCall(page.scope)) ?? inMenu[0];
  const isKnown = pageAt(hash.value) !== null;
  const signedIn = caller.value !== null;
  useEffect(() => {
    if (signedIn && !isKnown && first) location.replace(`#/${first.at}`);
  }, [signedIn, isKnown]);
  if (!signedIn) return html`<${SignIn} />`;
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <header class="top">
      <strong class="brand">Loraplex</strong>
      <${Menu} />
      <${Account} />
    </header>
    ${offline.value && html`<p class="offline" role="status" data-testid="offline">
      The server does not answer. It is tried again.</p>`}
    <main id="main" tabindex="-1">${content(pageAt(hash.value)?.page)}</main>`;
}

/** @param {import("./pages/index.js").PageEntry | undefined} page */
function content(page) {
  if (!page) return null;
  if (!isFor(page)) {
    return html`<p class="error" role="alert" data-testid="error">This page needs the admin token, on the admin port.</p>`;
  }
  return html`<${CurrentPage} />`;
}

/** The hash names a page, so the browser's own jump cannot be used. @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

setTheme("auto");
const place = document.getElementById("app");
if (place) {
  place.replaceChildren();
  render(html`<${App} />`, place);
}
