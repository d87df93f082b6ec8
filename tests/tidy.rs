//! House rules that a compiler does not check: module heads, import arrows, and
//! documentation that names every setting with its default.

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

#[test]
fn imports_run_one_way() {
    let edges = ["tonic", "prost", "tokio", "bytes", "rmp", "zeromq", "hyper"];
    let arrows: [(&str, &[&str], &[&str]); 4] = [
        ("src/arena", &edges, &["scan", "server", "bridge", "pb"]),
        ("src/scan", &edges, &["server", "bridge", "pb"]),
        ("src/server", &["zeromq", "rmp"], &["bridge"]),
        ("src/bridge", &["hyper"], &["scan", "server"]),
    ];
    for (folder, crates, modules) in arrows {
        for (path, text) in sources(&root().join(folder)) {
            let code = code(&text);
            for name in crates {
                assert!(!code.contains(&format!("{name}::")), "{} uses the crate {name}", path.display());
            }
            for name in modules {
                assert!(
                    !code.contains(&format!("crate::{name}")),
                    "{} uses the module {name}",
                    path.display()
                );
            }
            assert!(!code.contains("mimalloc"), "{}: allocators are the binaries' choice", path.display());
            assert!(!code.contains("std::env"), "{}: the library reads no environment", path.display());
        }
    }
}

#[test]
fn the_readme_names_every_setting_with_its_default() {
    let readme = fs::read_to_string(root().join("README.md")).expect("a README");
    let tables = [sgl_kv_indexer::server::SETTINGS, sgl_kv_indexer::bridge::config::TABLE];
    let settings: Vec<&Setting> = tables.into_iter().flatten().collect();
    assert!(settings.len() > 10, "found {} settings", settings.len());
    for setting in settings {
        let row = format!("| `{}` | ", setting.name);
        let default = match setting.default {
            Some("") => "empty".to_owned(),
            Some(value) => format!("`{value}`"),
            None => String::new(),
        };
        assert!(
            readme.lines().any(|line| line.strip_prefix(&row).is_some_and(|rest| rest.starts_with(&default))),
            "README.md has no row {row}{default}"
        );
    }
}
