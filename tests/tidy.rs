//! House rules that a compiler does not check: module heads, import arrows, what
//! belongs to the binaries, documentation that names every setting with its
//! default, and no word of anybody's own machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use sgl_kv_indexer::settings::Setting;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file under a folder, with its text.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("text");
            found.push((path, text));
        }
    }
    found
}

#[test]
fn every_module_opens_with_what_it_is() {
    let files = sources(&root().join("src"));
    assert!(files.len() > 30, "found {} files", files.len());
    for (path, text) in files {
        assert!(text.starts_with("//! "), "{} does not open with its documentation", path.display());
    }
}

/// Code without comments: prose may name what imports may not.
fn code(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Code of a module without its own tests, which may use what a build does not.
fn shipped(text: &str) -> String {
    let code = code(text);
    code.split("#[cfg(test)]").next().unwrap_or_default().to_owned()
}

/// Names that stand before `::` in `code` and after `before`: `crate::` gives the modules it uses.
fn paths(code: &str, before: &str) -> BTreeSet<String> {
    let name = |rest: &str| -> String {
        rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
    };
    let found = code.match_indices(before).map(|(at, _)| &code[at + before.len()..]);
    found
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default().split(',').map(str::trim).collect(),
            None => vec![rest],
        })
        .map(name)
        .filter(|name| !name.is_empty())
        .collect()
}

/// What a layer may use: other layers of this crate, and crates.
struct Layer {
    path: &'static str,
    modules: &'static [&'static str],
    crates: &'static [&'static str],
}

/// A new arrow is a line here and in `docs/ARCHITECTURE.md`.
const LAYERS: &[Layer] = &[
    Layer {
        path: "src/arena",
        modules: &["arena"],
        crates: &[
            "foldhash",
            "nohash_hasher",
            "parking_lot",
            "radsort",
            "roaring",
            "safe_arch",
            "slab",
            "smallvec",
            "std",
            "wide",
        ],
    },
    Layer { path: "src/scan", modules: &["arena", "scan"], crates: &["nohash_hasher", "roaring", "std"] },
    Layer {
        path: "src/server",
        modules: &["arena", "http", "limits", "metrics", "pb", "scan", "server", "settings", "version"],
        crates: &[
            "arc_swap",
            "bytes",
            "http",
            "http_body",
            "hyper",
            "hyper_util",
            "prost",
            "serde_json",
            "std",
            "subtle",
            "tokio",
            "tokio_rustls",
            "tonic",
            "tonic_health",
            "tonic_reflection",
            "tracing",
        ],
    },
    Layer {
        path: "src/bridge",
        modules: &["arena", "bridge", "http", "limits", "metrics", "pb", "settings", "version"],
        crates: &[
            "bytes",
            "crc32fast",
            "http",
            "hyper_util",
            "nohash_hasher",
            "rmp",
            "serde_json",
            "sha2",
            "socket2",
            "std",
            "tokio",
            "toml",
            "tonic",
            "tower",
            "tracing",
        ],
    },
    Layer {
        path: "src/client",
        modules: &["arena", "client", "limits", "scan"],
        crates: &["bytes", "http", "hyper", "parking_lot", "prost", "smallvec", "std", "tokio", "tonic"],
    },
    Layer {
        path: "src/cli",
        modules: &["arena", "bridge", "cli", "client", "hash", "limits", "pb", "scan", "settings", "version"],
        crates: &[
            "anstyle",
            "bytes",
            "clap",
            "clap_complete",
            "flate2",
            "hdrhistogram",
            "http",
            "hyper",
            "hyper_util",
            "indicatif",
            "parking_lot",
            "prost",
            "rmp",
            "serde_json",
            "std",
            "tokio",
            "tonic",
            "zeromq",
        ],
    },
    Layer { path: "src/hash", modules: &["hash"], crates: &["minicbor", "sha2", "std"] },
    Layer {
        path: "src/http",
        modules: &["settings"],
        crates: &["bytes", "http", "http_body_util", "hyper", "hyper_util", "std", "tokio", "tracing"],
    },
    Layer { path: "src/metrics", modules: &["metrics"], crates: &["prometheus_client", "serde_json", "std"] },
    Layer { path: "src/version.rs", modules: &[], crates: &[] },
    Layer { path: "src/limits.rs", modules: &[], crates: &["std"] },
    Layer { path: "src/settings.rs", modules: &[], crates: &["clap", "std"] },
];

/// Whether a layer's root module, or one of its children, reaches past the layer by `super`.
fn path_leaves_layer(path: &str, layer: &str, code: &str) -> bool {
    let below = path.rsplit_once(&format!("{layer}/")).map(|(_, below)| below.to_owned());
    match below.as_deref() {
        Some("mod.rs") => code.contains("super::"),
        Some(below) if !below.contains('/') => code.contains("super::super::"),
        _ => false,
    }
}

/// Crates that a manifest names, under the names that code has for them.
fn dependencies() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("a manifest");
    let mut section = "";
    let mut names = BTreeSet::from(["std".to_owned()]);
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.contains("dependencies]")
            && let Some((name, _)) = line.split_once(" = ")
            && !name.starts_with('#')
        {
            names.insert(name.replace('-', "_"));
        }
    }
    names
}

#[test]
fn imports_run_one_way() {
    let dependencies = dependencies();
    assert!(dependencies.len() > 20, "found {dependencies:?}");
    for layer in LAYERS {
        let path = root().join(layer.path);
        let files = if path.is_dir() {
            sources(&path)
        } else {
            vec![(path.clone(), fs::read_to_string(&path).expect("text"))]
        };
        for (path, text) in files {
            let (path, tests) = (path.display(), path.ends_with("tests.rs"));
            let code = if tests { String::new() } else { shipped(&text) };
            for module in paths(&code, "crate::") {
                assert!(layer.modules.contains(&module.as_str()), "{path} uses the module {module}");
            }
            let leaves = path_leaves_layer(&path.to_string(), layer.path, &code);
            assert!(!leaves, "{path} leaves its layer by `super`");
            for dependency in &dependencies {
                let used = code.match_indices(&format!("{dependency}::")).any(|(at, _)| {
                    let before = code[..at].chars().next_back();
                    before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_' && c != ':')
                });
                let allowed = layer.crates.contains(&dependency.as_str());
                assert!(!used || allowed, "{path} uses the crate {dependency}");
            }
        }
    }
}

#[test]
fn the_lock_has_one_home() {
    for (path, text) in sources(&root().join("src")) {
        let is_home = path.ends_with("src/arena/shared.rs");
        assert!(is_home || !code(&text).contains("RwLock"), "{} has the lock", path.display());
    }
}

#[test]
fn processes_belong_to_the_binaries() {
    for (path, text) in sources(&root().join("src")) {
        let is_binary = path.starts_with(root().join("src/bin"));
        let code = shipped(&text);
        for name in
            ["mimalloc", "global_allocator", "env::var", "env::args", "signal::", "tracing_subscriber"]
        {
            assert!(is_binary || !code.contains(name), "{} uses {name}", path.display());
        }
    }
}

/// The rows of the table under a heading of the README.
fn rows<'a>(readme: &'a str, heading: &str) -> Vec<&'a str> {
    let section = readme.lines().skip_while(|line| *line != heading).skip(1);
    section.take_while(|line| !line.starts_with('#')).filter(|line| line.starts_with('|')).collect()
}

#[test]
fn the_readme_names_every_setting_with_its_default() {
    let readme = fs::read_to_string(root().join("README.md")).expect("a README");
    let tables: [(&str, &[Setting]); 2] = [
        ("### kv-indexer-server", sgl_kv_indexer::server::SETTINGS),
        ("### kv-indexer-bridge", sgl_kv_indexer::bridge::config::TABLE),
    ];
    for (heading, settings) in tables {
        let rows = rows(&readme, heading);
        assert!(!settings.is_empty() && rows.len() >= settings.len(), "{heading}: {} rows", rows.len());
        for setting in settings {
            let row = format!("| `{}` | ", setting.name);
            let default = match setting.default {
                Some("") => "empty |".to_owned(),
                Some(value) => format!("`{value}` |"),
                None => String::new(),
            };
            let found = rows.iter().filter_map(|line| line.strip_prefix(&row)).collect::<Vec<_>>();
            assert!(
                found.len() == 1 && found[0].starts_with(&default),
                "{heading} has no row {row}{default}"
            );
            let is_plain = !found[0].starts_with('`');
            assert!(setting.default.is_some() || is_plain, "{heading} invents a default of {}", setting.name);
        }
        for row in rows.iter().skip(2) {
            let known = settings.iter().any(|setting| row.contains(&format!("`{}`", setting.name)));
            assert!(known, "{heading} has a row of no setting: {row}");
        }
    }
}

#[test]
fn no_file_names_a_place_on_somebodys_machine() {
    // Put together here, so that this file does not name them either.
    let places = ["home", "root", "Users", "work", "mnt"].map(|folder| format!("/{folder}/"));
    let mut checked = 0;
    for name in ["src", "tests", "examples", "benches", "docs", "proto", "perf", "scripts", "deploy", ".ci"] {
        checked += check_places(&root().join(name), &places);
    }
    for name in ["README.md", "CHANGELOG.md", "Cargo.toml", "build.rs"] {
        checked += check_places(&root().join(name), &places);
    }
    assert!(checked > 60, "{checked} files");
}

/// Checks every text file under a path; returns how many there are.
fn check_places(path: &Path, places: &[String]) -> usize {
    if path.is_dir() {
        // What measurements and builds leave there is not kept.
        if path.ends_with("perf/out") || path.ends_with("target") {
            return 0;
        }
        let entries = fs::read_dir(path).expect("a folder");
        return entries.map(|entry| check_places(&entry.expect("an entry").path(), places)).sum();
    }
    // A recording is no text.
    let Ok(text) = fs::read_to_string(path) else { return 0 };
    for (number, line) in text.lines().enumerate() {
        for place in places {
            // Part of a longer path, a URL's or a folder's of this repository, is none.
            let named = line.match_indices(place.as_str()).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                before.is_none_or(|c| !c.is_ascii_alphanumeric() && !"._-/".contains(c))
            });
            assert!(!named, "{}:{}: {line}", path.display(), number + 1);
        }
    }
    1
}
