//! Asks a server how much of a prompt each worker holds.
//!
//! `cargo run --example query-prefix -- URL FILE.expected.json.gz` asks every query
//! of a recording and compares the best answer with the recorded one; it exits
//! with 1 if one differs. `… -- URL HASH HASH …` asks one prompt.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::process::ExitCode;

use flate2::read::GzDecoder;
use serde_json::Value;
use sgl_kv_indexer::pb::MatchExternalKvPrefixRequest;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;

/// A prompt's hashes and, of a recording, how many blocks should match.
type Query = (Vec<i64>, Option<u64>);

/// A hash in decimal, signed or unsigned.
fn hash(text: &str) -> Result<i64, Box<dyn Error>> {
    text.parse::<i64>().or_else(|_| text.parse::<u64>().map(|hash| hash as i64)).map_err(Into::into)
}

fn recorded(file: &str) -> Result<Vec<Query>, Box<dyn Error>> {
    let mut text = String::new();
    GzDecoder::new(File::open(file).map_err(|error| format!("{file}: {error}"))?)
        .read_to_string(&mut text)?;
    let recording: Value = serde_json::from_str(&text)?;
    let queries = recording["queries"].as_array().ok_or("a recording without queries")?;
    let query = |query: &Value| -> Result<Query, Box<dyn Error>> {
        let hashes = query["hashes"].as_array().ok_or("a query without hashes")?;
        let hashes =
            hashes.iter().map(|text| hash(text.as_str().unwrap_or_default())).collect::<Result<_, _>>()?;
        // By the rules of components where the recording has them, else what the events
        // promise over all local tiers together.
        let by_tiers = query["events_prefix"].as_object();
        let union = by_tiers.and_then(|all| all.iter().max_by_key(|(tiers, _)| tiers.split('+').count()));
        let promised = query.get("seed_rule_prefix").or(union.map(|(_, blocks)| blocks));
        let promised = promised.and_then(Value::as_u64);
        Ok((hashes, promised))
    };
    queries
        .iter()
        .map(query)
        .filter(|query| query.as_ref().is_ok_and(|(hashes, _)| !hashes.is_empty()))
        .collect()
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, prompts @ ..] = arguments.as_slice() else {
        return Err("usage: query-prefix URL FILE.expected.json.gz | URL HASH...".into());
    };
    let queries = match prompts {
        [file] if file.ends_with(".gz") => recorded(file)?,
        hashes => vec![(hashes.iter().map(|text| hash(text)).collect::<Result<_, _>>()?, None)],
    };
    let mut client = KvIndexerClient::connect(url.clone()).await?;
    println!("{:>6}  {:>7}  {:>8}  {:<12} address", "blocks", "matched", "expected", "worker");
    let mut differ = 0;
    for (hashes, promised) in &queries {
        let request = MatchExternalKvPrefixRequest { hashes: hashes.clone(), max_blocks: 0 };
        let answer = client.match_external_kv_prefix(request).await?.into_inner();
        differ +=
            usize::from(promised.is_some_and(|promised| promised != u64::from(answer.best_prefix_blocks)));
        let expected = promised.map_or("-".to_owned(), |promised| promised.to_string());
        if answer.matches.is_empty() {
            println!("{:>6}  {:>7}  {expected:>8}  nobody", hashes.len(), 0);
        }
        for found in &answer.matches {
            let (blocks, worker) = (found.matched_prefix_blocks, &found.worker_id);
            println!(
                "{:>6}  {blocks:>7}  {expected:>8}  {worker:<12} {}",
                hashes.len(),
                found.worker_address
            );
        }
    }
    println!("{} queries, {differ} answered otherwise than expected", queries.len());
    Ok(ExitCode::from(u8::from(differ > 0)))
}
