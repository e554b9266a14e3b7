/* Puts the page together: chat, arena panel, the key dialog, and the two views of a narrow window. */

import { ApiError, request, setKey } from "./api.js";
import { ArenaPanel } from "./arena.js";
import { Chat } from "./chat.js";

const $ = (id) => document.getElementById(id);
let keyGiven = false;

const arena = new ArenaPanel({ onKeyWanted: askForKey });
const chat = new Chat({ onAnswer: (id) => (arena.mine = id), onKeyWanted: askForKey });

async function loadModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    chat.model = data[0].id;
    $("model").textContent = data[0].id;
    document.title = `${data[0].id} · pagedkv`;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    else setTimeout(loadModel, 4000);
  }
}

function askForKey() {
  const dialog = $("key-dialog");
  if (dialog.open) return;
  $("key-why").textContent = keyGiven ? "The server does not accept this key." : "This server asks for a key.";
  $("key").value = "";
  $("open-key").hidden = false;
  dialog.showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keyGiven = true;
  setKey($("key").value.trim());
  $("key-dialog").close();
  $("open-key").hidden = true;
  loadModel();
  arena.start();
  $("message").focus();
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("open-key").addEventListener("click", askForKey);

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of document.querySelectorAll(".views button")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
    arena.shown();
  });
}

loadModel();
arena.start();
