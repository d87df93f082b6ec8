//! TLS, certificates and tokens between the client, or the command line, and a real server.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::client::{Client, Config, Credentials, ErrorClass, Prompt};
use sgl_kv_indexer::server::{self, Security, Server};
use sgl_kv_indexer::settings::Settings;
use tokio::net::TcpListener;

use super::PATIENT;

const TOKEN: &str = "the-token-of-all-routers";

/// A folder of files, removed when its test ends.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-indexer-client-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Files(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed")
}

/// A certificate of this authority and its key, in PEM.
fn sign(authority: &Authority, name: SanType) -> (String, String) {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![name];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, authority).expect("signed");
    (certificate.pem(), key.serialize_pem())
}

async fn serve(pairs: &[(&'static str, &Path)]) -> String {
    let text = |path: &Path| -> &'static str { path.to_str().expect("UTF-8").to_owned().leak() };
    let settings = Settings::from_pairs(pairs.iter().map(|(name, path)| (*name, text(path))));
    let security = Security::from_settings(&settings).expect("usable files");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let server = Server::new(server::Config::default(), Arc::new(Index::new())).with_security(security);
    tokio::spawn(server.serve(listener, std::future::pending()));
    format!("https://{address}")
}

/// What comes of a query with these credentials; `None` for an answer.
async fn outcome(endpoint: &str, credentials: Credentials) -> Option<ErrorClass> {
    let config = Config { credentials, deadline: PATIENT, ..Config::with_endpoints([endpoint]) };
    let client = Client::new(&config).expect("usable");
    client.match_prefix(&Prompt::new(&[1])).await.err().map(|error| error.class)
}

#[tokio::test]
async fn who_is_known_and_shows_what_is_asked_for_is_answered() {
    let files = Files::new("secure");
    let (ours, theirs) = (authority(), authority());
    let (certificate, key) = sign(&ours, SanType::IpAddress([127, 0, 0, 1].into()));
    let router = sign(&ours, SanType::DnsName("router".try_into().expect("a name")));
    let stranger = sign(&theirs, SanType::DnsName("router".try_into().expect("a name")));
    let endpoint = serve(&[
        ("KV_INDEXER_TLS_CERT_FILE", &files.write("cert.pem", &certificate)),
        ("KV_INDEXER_TLS_KEY_FILE", &files.write("key.pem", &key)),
        ("KV_INDEXER_TLS_CLIENT_CA_FILE", &files.write("ca.pem", &ours.pem())),
        ("KV_INDEXER_QUERY_TOKEN_FILE", &files.write("query", TOKEN)),
        ("KV_INDEXER_APPLY_TOKEN_FILE", &files.write("apply", "the-token-of-all-bridges")),
    ])
    .await;
    let good = Credentials {
        authorities_pem: Some(ours.pem()),
        identity_pem: Some(router.clone()),
        token: Some(TOKEN.to_owned()),
    };
    assert_eq!(outcome(&endpoint, good.clone()).await, None);
    for (credentials, class) in [
        // A server that is not known, or that does not know the client, is none.
        (Credentials { authorities_pem: Some(theirs.pem()), ..good.clone() }, ErrorClass::Unreachable),
        (Credentials { identity_pem: None, ..good.clone() }, ErrorClass::Unreachable),
        (Credentials { identity_pem: Some(stranger), ..good.clone() }, ErrorClass::Unreachable),
        // A token is the contract's business.
        (Credentials { token: None, ..good.clone() }, ErrorClass::Rejected),
        (
            Credentials { token: Some("another-token-of-routers".into()), ..good.clone() },
            ErrorClass::Rejected,
        ),
        (
            Credentials { token: Some("the-token-of-all-bridges".into()), ..good.clone() },
            ErrorClass::Rejected,
        ),
    ] {
        assert_eq!(outcome(&endpoint, credentials.clone()).await, Some(class), "{credentials:?}");
    }

    let flags = [
        ("--ca-file", files.write("ca.pem", &ours.pem())),
        ("--client-cert-file", files.write("router.pem", &router.0)),
        ("--client-key-file", files.write("router.key", &router.1)),
        ("--token-file", files.write("token", &format!("{TOKEN}\n"))),
    ];
    // All flags, then each left out: nothing found, no answer, bad arguments or refused.
    for (left_out, code) in [(4, 1), (0, 2), (1, 2), (2, 2), (3, 4)] {
        for command in ["query", "match"] {
            let given = flags.iter().enumerate().filter(|(place, _)| *place != left_out);
            let mut run = tokio::process::Command::new(env!("CARGO_BIN_EXE_kv-indexer"));
            run.args([command, "1", "--server", &endpoint]).env_clear();
            given.for_each(|(_, (flag, path))| {
                run.arg(flag).arg(path);
            });
            let output = run.output().await.expect("the binary");
            assert_eq!(output.status.code(), Some(code), "{command} without {left_out}: {output:?}");
        }
    }
}
