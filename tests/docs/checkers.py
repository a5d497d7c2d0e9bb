"""The checkers of HTML: the Nu HTML checker (vnu) and axe.

vnu and axe come from npm in the versions below; Java, Node.js' npm and Chromium from Debian's packages.
"""
import json
import os
import shutil
import subprocess

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PACKAGES = {"axe-core": "4.14.1", "vnu-jar": "26.9.27"}


def install(asker):
    """The place of the npm packages; `asker` is who says what is installed."""
    missing = [package for program, package in (("java", "default-jre-headless"), ("npm", "npm"), ("chromium", "chromium"))
               if not shutil.which(program)]
    if missing:
        again = os.path.join(ROOT, "tests/again")
        root = [] if os.getuid() == 0 else ["sudo"]
        print(f"{asker}: installing {' '.join(missing)}", flush=True)
        subprocess.run([again, *root, "apt-get", "update", "-qq"], check=True)
        subprocess.run([again, *root, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True,
                       env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdout=subprocess.DEVNULL)
    place = os.path.join(os.path.realpath(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))), "docs")
    os.makedirs(place, exist_ok=True)
    for name, version in PACKAGES.items():
        try:
            with open(os.path.join(place, "node_modules", name, "package.json"), encoding="utf-8") as file:
                if json.load(file)["version"] == version:
                    continue
        except OSError:
            pass
        subprocess.run([os.path.join(ROOT, "tests/again"), "npm", "install", "--silent", "--ignore-scripts", "--no-audit",
                        "--no-fund", "--prefix", place, *(f"{name}@{version}" for name, version in PACKAGES.items())],
                       check=True, stderr=subprocess.DEVNULL)
    return os.path.join(place, "node_modules")


def messages(modules, place, patience):
    """(file, line, what is wrong) of all HTML in a file or a directory."""
    jar = os.path.join(modules, "vnu-jar/build/dist/vnu.jar")
    done = subprocess.run(["java", "-jar", jar, "--errors-only", "--skip-non-html", "--format", "json", place],
                          capture_output=True, text=True, timeout=patience)
    for message in json.loads(done.stderr)["messages"]:
        yield message["url"].removeprefix("file:"), message.get("lastLine", "?"), message["message"]
