//! Which build this is, for `--version`, the log and `/metrics`.

/// The crate's version.
pub const NUMBER: &str = env!("CARGO_PKG_VERSION");

/// The commit it was built from; `debug` for a debug build, `unknown` without a repository.
pub const COMMIT: &str = env!("KV_INDEXER_COMMIT");

/// Both, as `--version` prints them after the binary's name.
pub const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("KV_INDEXER_COMMIT"), ")");
