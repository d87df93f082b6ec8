//! The hashes that a question is about.
//!
//! Numbers come as arguments, from a file or from standard input, apart from each
//! other by anything that is no part of a number, so that a JSON list will do. They
//! are hashes, signed or unsigned, decimal or in hex after `0x`, or with an engine
//! named they are token ids, which are hashed as that engine does.

use std::fs::File;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Environment, Failure};
use crate::client::HASHES_PER_QUERY_MAX;
use crate::hash::{Sglang, VllmCbor};

/// Longest text of numbers that is read: 64 bytes for each of the most tokens or hashes of a query.
const TEXT_BYTES_MAX: u64 = 64 * HASHES_PER_QUERY_MAX as u64;

/// How token ids are hashed.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Engine {
    /// As SGLang does.
    Sglang,
    /// As vLLM does with --prefix-caching-hash-algo sha256_cbor.
    VllmCbor,
}

#[derive(Debug, Args)]
pub(super) struct PromptArguments {
    /// Block hashes, decimal or after 0x in hex; with --engine token ids.
    #[arg(value_name = "NUMBER", allow_negative_numbers = true, required_unless_present = "file")]
    numbers: Vec<String>,
    /// Reads the numbers from this file instead; - is standard input.
    #[arg(long, short, value_name = "PATH", conflicts_with = "numbers")]
    file: Option<PathBuf>,
    /// The numbers are token ids; hashes them as this engine does.
    #[arg(long, requires = "page_size")]
    engine: Option<Engine>,
    /// Tokens of a block, for --engine.
    #[arg(long, value_name = "TOKENS", requires = "engine")]
    page_size: Option<NonZeroUsize>,
    /// The request's cache salt, for --engine.
    #[arg(long, value_name = "SALT", requires = "engine", default_value = "")]
    cache_salt: String,
    /// The workers' PYTHONHASHSEED, for --engine vllm-cbor.
    #[arg(long, value_name = "SEED", requires = "engine")]
    seed: Option<String>,
    /// The workers' cache is keyed by pairs of tokens, for --engine sglang with EAGLE.
    #[arg(long, requires = "engine")]
    pairs: bool,
}

impl PromptArguments {
    /// The hashes, at least one.
    pub(super) fn hashes(&self, environment: &mut Environment<'_>) -> Result<Vec<i64>, Failure> {
        let text = match &self.file {
            None => self.numbers.join(" "),
            Some(path) if path.as_os_str() == "-" => read(environment.input, "standard input")?,
            Some(path) => {
                let file = File::open(path);
                let mut file =
                    file.map_err(|error| Failure::Input(format!("{}: {error}", path.display())))?;
                read(&mut file, &path.display().to_string())?
            }
        };
        let hashes = match (self.engine, self.page_size) {
            (Some(engine), Some(page)) => self.hash(engine, page, &numbers(&text, token)?),
            _ => numbers(&text, hash)?,
        };
        if hashes.is_empty() {
            let what = if self.engine.is_some() { "no whole block of token ids" } else { "no hash" };
            return Err(Failure::Input(format!("the input has {what}")));
        }
        Ok(hashes)
    }

    fn hash(&self, engine: Engine, page: NonZeroUsize, tokens: &[u64]) -> Vec<i64> {
        match engine {
            Engine::Sglang => {
                Sglang::new(page).pairs(self.pairs).cache_salt(&self.cache_salt).hashes(tokens).collect()
            }
            Engine::VllmCbor => {
                let rules = VllmCbor::new(page).cache_salt(&self.cache_salt);
                let rules = match &self.seed {
                    Some(seed) => rules.seed(seed),
                    None => rules,
                };
                rules.hashes(tokens).collect()
            }
        }
    }
}

fn read(from: &mut dyn Read, name: &str) -> Result<String, Failure> {
    let mut text = String::new();
    from.take(TEXT_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| Failure::Input(format!("{name}: {error}")))?;
    if text.len() as u64 > TEXT_BYTES_MAX {
        return Err(Failure::Input(format!("{name}: more numbers than a query can carry")));
    }
    Ok(text)
}

/// The numbers of a text, one error naming the first that is none.
fn numbers<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, Failure> {
    let apart = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '[' | ']' | '"' | '\'');
    text.split(apart)
        .filter(|number| !number.is_empty())
        .map(|number| {
            parse(number).ok_or_else(|| Failure::Input(format!("{number:?} is no number that fits")))
        })
        .collect()
}

/// A hash: 64 bits, signed or unsigned.
fn hash(text: &str) -> Option<i64> {
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok().map(u64::cast_signed);
    }
    text.parse().ok().or_else(|| text.parse().ok().map(u64::cast_signed))
}

/// A token id: engines take none past 63 bits.
fn token(text: &str) -> Option<u64> {
    text.parse().ok().filter(|token| i64::try_from(*token).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_read_in_every_form() {
        let read = |text| numbers(text, hash).map_err(|failure| failure.to_string());
        assert_eq!(read("1 -2,\n[\"3\", 0xffffffffffffffff]"), Ok(vec![1, -2, 3, -1]));
        assert_eq!(read("18446744073709551615 9223372036854775808"), Ok(vec![-1, i64::MIN]));
        assert_eq!(read(""), Ok(vec![]));
        for bad in ["x", "1.5", "0x", "18446744073709551616", "-9223372036854775809", "0xfffffffffffffffff"] {
            assert_eq!(read(bad), Err(format!("{bad:?} is no number that fits")));
        }
    }

    #[test]
    fn token_ids_are_not_negative() {
        assert!(numbers("0 9223372036854775807", token).is_ok());
        assert!(numbers("-1", token).is_err() && numbers("9223372036854775808", token).is_err());
    }
}
