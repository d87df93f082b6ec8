//! TLS, certificates of clients, tokens: real connections, and a bridge among them.

mod common;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::bridge::{Bridge, numbered};
use common::publisher::Publisher;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::bridge::credentials::Credentials;
use sgl_kv_indexer::pb::admin::admin_client::AdminClient;
use sgl_kv_indexer::pb::admin::{DropWorkerRequest, ListWorkersRequest};
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{ApplyExternalKvBatchRequest, MatchExternalKvPrefixRequest};
use sgl_kv_indexer::server::{Config, Security, Server};
use sgl_kv_indexer::settings::{SettingError, Settings};
use tokio::net::TcpListener;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const QUERY_TOKEN: &str = "the-token-of-all-routers";
const APPLY_TOKEN: &str = "the-token-of-all-bridges";

/// A folder of files, removed when its test ends.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-indexer-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Files(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        std::fs::write(self.path(name), text).expect("written");
        self.path(name)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A certificate authority and what it signs.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
#[derive(Clone)]
struct Signed {
    cert: String,
    key: String,
}

impl Signed {
    fn identity(&self) -> Identity {
        Identity::from_pem(&self.cert, &self.key)
    }
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed"))
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    fn sign(&self, names: &[SanType]) -> Signed {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.to_vec();
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.0).expect("signed");
        Signed { cert: cert.pem(), key: key.serialize_pem() }
    }

    /// One for a server on loopback.
    fn server(&self) -> Signed {
        self.sign(&[SanType::IpAddress([127, 0, 0, 1].into())])
    }

    fn client(&self, name: &str) -> Signed {
        let name = match name.contains("://") {
            true => SanType::URI(name.try_into().expect("a URI")),
            false => SanType::DnsName(name.try_into().expect("a name")),
        };
        self.sign(&[name])
    }
}

fn settings(pairs: &[(&'static str, &Path)]) -> Settings {
    let pairs = pairs.iter().map(|(name, path)| {
        let text: &'static str = path.to_str().expect("UTF-8").to_owned().leak();
        (*name, text)
    });
    Settings::from_pairs(pairs)
}

fn security(pairs: &[(&'static str, &Path)]) -> Result<Security, SettingError> {
    Security::from_settings(&settings(pairs))
}

async fn serve(security: &Security) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let server = Server::new(Config::default(), Arc::new(Index::new())).with_security(security.clone());
    tokio::spawn(server.serve(listener, std::future::pending()));
    address
}

/// A client of a server that it trusts by `ca`, showing `identity`.
fn over_tls(address: SocketAddr, ca: &Authority, identity: Option<&Signed>) -> Channel {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.pem()));
    if let Some(identity) = identity {
        tls = tls.identity(identity.identity());
    }
    let endpoint = Endpoint::from_shared(format!("https://{address}")).expect("a URL");
    endpoint.tls_config(tls).expect("TLS").connect_lazy()
}

fn in_the_clear(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).expect("a URL").connect_lazy()
}

fn with<T>(message: T, token: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let value = format!("Bearer {token}").parse().expect("a value");
        request.metadata_mut().insert("authorization", value);
    }
    request
}

fn code<T>(answer: Result<T, Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// What a query is answered, and an apply.
async fn both(channel: Channel, token: Option<&str>) -> [Code; 2] {
    let mut client = KvIndexerClient::new(channel);
    let query = MatchExternalKvPrefixRequest { hashes: vec![1], max_blocks: 0 };
    let apply = ApplyExternalKvBatchRequest { worker_id: "w".to_owned(), ..Default::default() };
    [
        code(client.match_external_kv_prefix(with(query, token)).await),
        code(client.apply_external_kv_batch(with(apply, token)).await),
    ]
}

/// What a list of workers is answered, and a drop of one.
async fn operators(channel: Channel, token: Option<&str>) -> [Code; 2] {
    let mut client = AdminClient::new(channel);
    let drop = DropWorkerRequest { worker_id: "w".to_owned() };
    [
        code(client.list_workers(with(ListWorkersRequest::default(), token)).await),
        code(client.drop_worker(with(drop, token)).await),
    ]
}

async fn health(channel: Channel) -> Code {
    code(HealthClient::new(channel).check(HealthCheckRequest::default()).await)
}

#[tokio::test]
async fn tokens_open_what_they_are_for_and_nothing_else() {
    let files = Files::new("tokens");
    let query = files.write("query", &format!("{QUERY_TOKEN}\nanother-token-of-routers\n"));
    let apply = files.write("apply", APPLY_TOKEN);
    let security =
        security(&[("KV_INDEXER_QUERY_TOKEN_FILE", &query), ("KV_INDEXER_APPLY_TOKEN_FILE", &apply)])
            .expect("settings");
    assert!(!security.is_open());
    let address = serve(&security).await;
    let rows = [
        (None, [Code::Unauthenticated, Code::Unauthenticated]),
        (Some("a-token-of-a-stranger"), [Code::Unauthenticated, Code::Unauthenticated]),
        (Some(QUERY_TOKEN), [Code::Ok, Code::PermissionDenied]),
        (Some("another-token-of-routers"), [Code::Ok, Code::PermissionDenied]),
        (Some(APPLY_TOKEN), [Code::PermissionDenied, Code::Ok]),
    ];
    for (token, expected) in rows {
        assert_eq!(both(in_the_clear(address), token).await, expected, "{token:?}");
        // Operators need what bridges need.
        assert_eq!(operators(in_the_clear(address), token).await, [expected[1]; 2], "{token:?}");
    }
    assert_eq!(health(in_the_clear(address)).await, Code::Ok, "probes need no token");

    // A new file is in force at the next look, a bad one never.
    files.write("query", "the-next-token-of-routers");
    security.look_again();
    let next = Some("the-next-token-of-routers");
    assert_eq!(both(in_the_clear(address), next).await[0], Code::Ok);
    assert_eq!(both(in_the_clear(address), Some(QUERY_TOKEN)).await[0], Code::Unauthenticated);
    files.write("query", "");
    security.look_again();
    assert_eq!(both(in_the_clear(address), next).await[0], Code::Ok);
}

#[tokio::test]
async fn applies_alone_may_be_guarded() {
    let files = Files::new("applies");
    let apply = files.write("apply", APPLY_TOKEN);
    let address = serve(&security(&[("KV_INDEXER_APPLY_TOKEN_FILE", &apply)]).expect("settings")).await;
    assert_eq!(both(in_the_clear(address), None).await, [Code::Ok, Code::Unauthenticated]);
    assert_eq!(both(in_the_clear(address), Some(APPLY_TOKEN)).await, [Code::Ok, Code::Ok]);
}

#[tokio::test]
async fn a_server_with_a_certificate_speaks_tls_alone_and_renews_it() {
    let files = Files::new("tls");
    let (authority, next) = (Authority::new(), Authority::new());
    let signed = authority.server();
    let (cert, key) = (files.write("cert", &signed.cert), files.write("key", &signed.key));
    let security = security(&[("KV_INDEXER_TLS_CERT_FILE", &cert), ("KV_INDEXER_TLS_KEY_FILE", &key)]);
    let security = security.expect("settings");
    let address = serve(&security).await;
    assert_eq!(both(over_tls(address, &authority, None), None).await, [Code::Ok, Code::Ok]);
    assert_ne!(both(in_the_clear(address), None).await, [Code::Ok, Code::Ok]);
    assert_ne!(both(over_tls(address, &next, None), None).await, [Code::Ok, Code::Ok]);

    // Half of a change fits no key, so the old certificate stays until both are there.
    let renewed = next.server();
    files.write("cert", &renewed.cert);
    security.look_again();
    assert_eq!(both(over_tls(address, &authority, None), None).await, [Code::Ok, Code::Ok]);
    files.write("key", &renewed.key);
    security.look_again();
    assert_eq!(both(over_tls(address, &next, None), None).await, [Code::Ok, Code::Ok]);
    assert_ne!(both(over_tls(address, &authority, None), None).await, [Code::Ok, Code::Ok]);
    files.write("cert", "no certificate");
    security.look_again();
    assert_eq!(both(over_tls(address, &next, None), None).await, [Code::Ok, Code::Ok]);
}

#[tokio::test]
async fn clients_show_certificates_and_their_names_decide() {
    let files = Files::new("mutual");
    let (authority, stranger) = (Authority::new(), Authority::new());
    let signed = authority.server();
    let (cert, key) = (files.write("cert", &signed.cert), files.write("key", &signed.key));
    let ca = files.write("ca", &authority.pem());
    let mutual: [(&'static str, &Path); 3] = [
        ("KV_INDEXER_TLS_CERT_FILE", &cert),
        ("KV_INDEXER_TLS_KEY_FILE", &key),
        ("KV_INDEXER_TLS_CLIENT_CA_FILE", &ca),
    ];
    let any = serve(&security(&mutual).expect("settings")).await;
    let router = authority.client("router.example");
    assert_eq!(both(over_tls(any, &authority, Some(&router)), None).await, [Code::Ok, Code::Ok]);
    for identity in [None, Some(&stranger.client("router.example"))] {
        let answers = both(over_tls(any, &authority, identity), None).await;
        assert!(!answers.contains(&Code::Ok), "{answers:?}");
    }

    let names: [(&'static str, &Path); 2] = [
        ("KV_INDEXER_QUERY_NAMES", Path::new("router.example, other.example")),
        ("KV_INDEXER_APPLY_NAMES", Path::new("spiffe://fleet/bridge")),
    ];
    let named = serve(&security(&[&mutual[..], &names].concat()).expect("settings")).await;
    let rows = [
        ("router.example", [Code::Ok, Code::PermissionDenied]),
        ("spiffe://fleet/bridge", [Code::PermissionDenied, Code::Ok]),
        ("spiffe://fleet/bridge/2", [Code::Unauthenticated, Code::Unauthenticated]),
        ("x.router.example", [Code::Unauthenticated, Code::Unauthenticated]),
    ];
    for (name, expected) in rows {
        let client = authority.client(name);
        assert_eq!(both(over_tls(named, &authority, Some(&client)), None).await, expected, "{name}");
    }
}

#[tokio::test]
async fn a_bridge_reports_over_mutual_tls_with_a_token_that_is_renewed() {
    let files = Files::new("bridge");
    let authority = Authority::new();
    let (server, bridge) = (authority.server(), authority.client("bridge.example"));
    let ca = files.write("ca", &authority.pem());
    let (cert, key) = (files.write("cert", &server.cert), files.write("key", &server.key));
    let security = security(&[
        ("KV_INDEXER_TLS_CERT_FILE", &cert),
        ("KV_INDEXER_TLS_KEY_FILE", &key),
        ("KV_INDEXER_TLS_CLIENT_CA_FILE", &ca),
        ("KV_INDEXER_APPLY_TOKEN_FILE", &files.write("apply", APPLY_TOKEN)),
    ]);
    let address = serve(&security.expect("settings")).await;
    let mut publisher = Publisher::bind("").await;
    let credentials = Credentials {
        ca: Some(ca),
        identity: Some((files.write("bridge-cert", &bridge.cert), files.write("bridge-key", &bridge.key))),
        token: Some(files.write("token", "a-token-that-has-expired")),
    };
    let bridge = Bridge::start_with(&publisher.endpoint, &format!("https://{address}"), &[], |config| {
        config.credentials = credentials;
    });
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    bridge.until(|now| now.servers[0].failures > 0 && now.servers[0].sent_rpcs == 0).await;
    files.write("token", &format!("{APPLY_TOKEN}\n"));
    let now = bridge.until(|now| now.servers[0].sent_rpcs > 0 && now.servers[0].pending_bytes == 0).await;
    assert_eq!((now.ended, now.health.batches), (None, 1));
    bridge.stop().await;
}

#[test]
fn files_that_cannot_be_used_are_named_with_their_setting_and_not_shown() {
    let files = Files::new("unusable");
    let authority = Authority::new();
    let (one, other) = (authority.server(), authority.server());
    let cert = files.write("cert", &one.cert);
    let key = files.write("key", &one.key);
    let wrong = files.write("other", &other.key);
    let text = files.write("text", "SECRET and no PEM");
    let missing = files.path("missing");
    const CERT: &str = "KV_INDEXER_TLS_CERT_FILE";
    const KEY: &str = "KV_INDEXER_TLS_KEY_FILE";
    const CA: &str = "KV_INDEXER_TLS_CLIENT_CA_FILE";
    const APPLY: &str = "KV_INDEXER_APPLY_TOKEN_FILE";
    let rows: [(&[(&'static str, &Path)], &str); 8] = [
        (&[(CERT, &cert)], KEY),
        (&[(KEY, &key)], CERT),
        (&[(CA, &cert)], CERT),
        (&[(CERT, &missing), (KEY, &key)], CERT),
        (&[(CERT, &text), (KEY, &key)], CERT),
        (&[(CERT, &cert), (KEY, &wrong)], KEY),
        (&[(CERT, &cert), (KEY, &key), (CA, &text)], CA),
        (&[(APPLY, &text)], APPLY),
    ];
    for (pairs, name) in rows {
        let error = security(pairs).err().unwrap_or_else(|| panic!("{pairs:?}"));
        assert_eq!(error.name, name, "{error}");
        assert!(!error.to_string().contains("SECRET"), "{error}");
    }
}
