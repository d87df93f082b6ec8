//! Who may ask and who may report, by token or by the name of a client's certificate.
//!
//! There are two rights. A router queries, a bridge applies, and neither can do the
//! other's: a stolen router token cannot empty the index, and a worker cannot read
//! what others hold. A right that no setting asks anything for is everybody's.
//! Probes and reflection tell nothing of the index and are open.
//!
//! A call is judged by its headers, before a byte of its body is read. Tokens are
//! compared in a time that does not depend on them.

use std::path::PathBuf;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use subtle::{Choice, ConstantTimeEq};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::kept::{Kept, Unusable};
use super::tls::{CLIENT_CA_FILE, client_names};
use super::unusable;
use crate::server::observe::Method;
use crate::settings::{Setting, SettingError, Settings};

pub(super) const QUERY_TOKEN_FILE: Setting = Setting {
    name: "KV_INDEXER_QUERY_TOKEN_FILE",
    value: "FILE",
    default: None,
    help: "Tokens that allow queries, one a line, sent as authorization: Bearer TOKEN. Read again when it changes.",
};

pub(super) const APPLY_TOKEN_FILE: Setting = Setting {
    name: "KV_INDEXER_APPLY_TOKEN_FILE",
    value: "FILE",
    default: None,
    help: "Tokens that allow applies, in the same form. Read again when it changes.",
};

pub(super) const QUERY_NAMES: Setting = Setting {
    name: "KV_INDEXER_QUERY_NAMES",
    value: "NAMES",
    default: None,
    help: "DNS names or URIs of client certificates that allow queries, separated by commas.",
};

pub(super) const APPLY_NAMES: Setting =
    Setting { name: "KV_INDEXER_APPLY_NAMES", value: "NAMES", default: None, help: "The same for applies." };

/// Fewest characters of a token: what is shorter can be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Most tokens of a file, as each call is compared with all of them.
const TOKENS_MAX: usize = 16;

/// What a call may be refused for before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Denied {
    /// It shows nothing that is known.
    Unknown,
    /// It shows what allows other calls than this one.
    NotAllowed,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Denied::Unknown => "no valid token or certificate for this call",
            Denied::NotAllowed => "this token or certificate does not allow this call",
        })
    }
}

impl std::error::Error for Denied {}

/// What the certificate of a connection allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::server) struct Grants {
    query: bool,
    apply: bool,
}

/// What one right asks for. Nothing at all makes it everybody's.
#[derive(Debug, Default)]
struct Demand {
    tokens: Option<Kept<Tokens>>,
    names: Vec<String>,
}

/// Invariant: at least one, each at least [`TOKEN_CHARS_MIN`] long.
struct Tokens(Vec<Vec<u8>>);

/// The two rights.
#[derive(Debug, Default)]
pub(in crate::server) struct Gate {
    query: Demand,
    apply: Demand,
}

impl Gate {
    pub(super) fn from_settings(settings: &Settings, asks_names: bool) -> Result<Self, SettingError> {
        let query = Demand::from_settings(settings, &QUERY_TOKEN_FILE, &QUERY_NAMES, asks_names)?;
        let apply = Demand::from_settings(settings, &APPLY_TOKEN_FILE, &APPLY_NAMES, asks_names)?;
        // Whoever guards reading and leaves writing open has forgotten something.
        if apply.is_nothing() && !query.is_nothing() {
            return Err(SettingError {
                name: APPLY_TOKEN_FILE.name,
                value: None,
                takes: format!("a file, or {} names, as queries are guarded", APPLY_NAMES.name),
            });
        }
        Ok(Gate { query, apply })
    }

    /// Whether everybody may do everything.
    pub(super) fn is_open(&self) -> bool {
        self.query.is_nothing() && self.apply.is_nothing()
    }

    pub(super) fn has_files(&self) -> bool {
        self.query.tokens.is_some() || self.apply.tokens.is_some()
    }

    pub(super) fn look_again(&self) {
        for (demand, what) in [(&self.query, "query tokens"), (&self.apply, "apply tokens")] {
            if let Some(tokens) = &demand.tokens {
                tokens.look_and_tell(what);
            }
        }
    }

    /// What the certificate shown on a connection allows.
    pub(in crate::server) fn grants(&self, stream: &TlsStream<TcpStream>) -> Grants {
        let names = client_names(stream);
        Grants { query: self.query.has_name(&names), apply: self.apply.has_name(&names) }
    }

    /// Whether a call may go on.
    pub(in crate::server) fn check(
        &self,
        method: Method,
        headers: &HeaderMap,
        grants: Grants,
    ) -> Result<(), Denied> {
        let (demand, granted, other, other_granted) = match method {
            Method::MatchPrefix | Method::Match | Method::HitCounts => {
                (&self.query, grants.query, &self.apply, grants.apply)
            }
            Method::Apply | Method::Admin => (&self.apply, grants.apply, &self.query, grants.query),
            Method::Other => return Ok(()),
        };
        if granted || demand.is_nothing() {
            return Ok(());
        }
        let token = bearer(headers);
        if demand.has_token(token) {
            return Ok(());
        }
        Err(if other_granted || other.has_token(token) { Denied::NotAllowed } else { Denied::Unknown })
    }
}

impl Demand {
    fn from_settings(
        settings: &Settings,
        token_file: &Setting,
        names: &Setting,
        asks_names: bool,
    ) -> Result<Self, SettingError> {
        let tokens = settings.get(token_file).map(|path| {
            let path = PathBuf::from(path);
            Kept::read(vec![path.clone()], tokens).map_err(|error| unusable(token_file, &path, error.why))
        });
        let list = settings.parse_optional(names, "names, separated by commas", |text| {
            let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
            names.iter().all(|name| !name.is_empty()).then_some(names)
        })?;
        if list.is_some() && !asks_names {
            let takes = format!("names only with {}, as nobody shows one else", CLIENT_CA_FILE.name);
            return Err(SettingError {
                name: names.name,
                value: settings.get(names).map(str::to_owned),
                takes,
            });
        }
        Ok(Demand { tokens: tokens.transpose()?, names: list.unwrap_or_default() })
    }

    fn is_nothing(&self) -> bool {
        self.tokens.is_none() && self.names.is_empty()
    }

    fn has_name(&self, shown: &[String]) -> bool {
        shown.iter().any(|name| self.names.contains(name))
    }

    fn has_token(&self, token: Option<&[u8]>) -> bool {
        let Some((token, kept)) = token.zip(self.tokens.as_ref()) else { return false };
        kept.with(|tokens| tokens.has(token))
    }
}

impl Tokens {
    /// Compares with all of them, whichever matches.
    fn has(&self, token: &[u8]) -> bool {
        let known = self.0.iter().fold(Choice::from(0), |known, one| known | one.as_slice().ct_eq(token));
        known.into()
    }
}

/// The tokens of a file; an error says no word of them.
fn tokens(contents: &[Vec<u8>]) -> Result<Tokens, Unusable> {
    let wrong = |why: String| Err(Unusable { file: 0, why });
    let lines = contents[0].split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let tokens: Vec<Vec<u8>> = lines.filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect();
    if tokens.is_empty() || tokens.len() > TOKENS_MAX {
        return wrong(format!("{} tokens, not 1 to {TOKENS_MAX}", tokens.len()));
    }
    let is_good = |token: &Vec<u8>| token.len() >= TOKEN_CHARS_MIN && token.iter().all(u8::is_ascii_graphic);
    match tokens.iter().position(|token| !is_good(token)) {
        Some(place) => {
            wrong(format!("token {} is not {TOKEN_CHARS_MIN} or more printable characters", place + 1))
        }
        None => Ok(Tokens(tokens)),
    }
}

/// The token of `authorization: Bearer TOKEN`.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(authorization: &[u8]) -> HeaderMap {
        let value = http::HeaderValue::from_bytes(authorization).expect("a value");
        HeaderMap::from_iter([(AUTHORIZATION, value)])
    }

    #[test]
    fn tokens_are_read_line_by_line_and_weak_ones_refused() {
        let read = |text: &str| tokens(&[text.as_bytes().to_vec()]);
        let two = read("  0123456789abcdef\r\n\n fedcba9876543210fedcba\n").expect("tokens");
        assert!(two.has(b"0123456789abcdef") && two.has(b"fedcba9876543210fedcba"));
        for other in ["", "0123456789abcde", "0123456789abcdefg", "0123456789ABCDEF"] {
            assert!(!two.has(other.as_bytes()), "{other}");
        }
        let many = "0123456789abcdef\n".repeat(TOKENS_MAX + 1);
        for text in ["", "\n\n", "short", "0123456789 abcdef", many.as_str()] {
            let why = read(text).err().expect(text).why;
            assert!(!why.contains("short") && !why.contains("0123"), "the error tells the token: {why}");
        }
    }

    #[test]
    fn a_token_comes_as_a_bearer() {
        for text in [&b"Bearer t0ken"[..], b"bearer t0ken", b"BEARER  t0ken "] {
            assert_eq!(bearer(&headers(text)), Some(&b"t0ken"[..]));
        }
        for text in [&b"Basic t0ken"[..], b"Bearer", b"t0ken", b"Bearert0ken"] {
            assert_eq!(bearer(&headers(text)), None, "{text:?}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }

    #[test]
    fn settings_that_belong_together_are_asked_for() {
        let read = |pairs: &[(&'static str, &'static str)]| {
            Gate::from_settings(&Settings::from_pairs(pairs.iter().copied()), false)
        };
        assert!(read(&[]).expect("open").is_open());
        let error = read(&[("KV_INDEXER_APPLY_NAMES", "a")]).expect_err("no certificates");
        assert!(error.to_string().contains("KV_INDEXER_TLS_CLIENT_CA_FILE"), "{error}");
        let error = read(&[("KV_INDEXER_APPLY_TOKEN_FILE", "no-such-file")]).expect_err("no file");
        assert_eq!(error.name, "KV_INDEXER_APPLY_TOKEN_FILE");
        let guarded =
            Gate::from_settings(&Settings::from_pairs([("KV_INDEXER_QUERY_NAMES", "router")]), true);
        assert_eq!(guarded.expect_err("applies are open").name, "KV_INDEXER_APPLY_TOKEN_FILE");
    }

    #[test]
    fn rights_are_apart() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let gate = Gate {
            query: Demand { tokens: None, names: names(&["router"]) },
            apply: Demand { tokens: None, names: names(&["bridge", "spiffe://x/bridge"]) },
        };
        let grants = |shown: &[&str]| {
            let shown = names(shown);
            Grants { query: gate.query.has_name(&shown), apply: gate.apply.has_name(&shown) }
        };
        let none = HeaderMap::new();
        let check = |method, shown: &[&str]| gate.check(method, &none, grants(shown));
        for method in [Method::MatchPrefix, Method::Match, Method::HitCounts] {
            assert_eq!(check(method, &["router"]), Ok(()));
            assert_eq!(check(method, &["spiffe://x/bridge"]), Err(Denied::NotAllowed));
            assert_eq!(check(method, &["stranger"]), Err(Denied::Unknown));
        }
        for method in [Method::Apply, Method::Admin] {
            assert_eq!(check(method, &["router"]), Err(Denied::NotAllowed));
            assert_eq!(check(method, &["bridge"]), Ok(()));
            assert_eq!(check(method, &[]), Err(Denied::Unknown));
        }
        assert_eq!(Method::of("/kv_indexer.admin.v1.Admin/DropWorker"), Method::Admin);
        assert_eq!(check(Method::Other, &[]), Ok(()));
        assert_eq!(Gate::default().check(Method::Apply, &none, Grants::default()), Ok(()));
    }
}
