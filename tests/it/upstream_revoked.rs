//! Certificates that those who made them have revoked, of upstreams and of clients.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::servers::certificates::{self, authority, authority_of, revoked, signed};
use crate::support::faults::clock_shim;
use crate::support::https::{Certificates, Https, http2};
use crate::support::{Gate, Plan, Reply, Service, Terms, Tls, Upstream, eventually};

/// How a test made a chain of `root`, `middle` and `leaf`, and the lists of both authorities: `roots`, `middles`.
struct Chain(TempDir);

impl Chain {
    fn new() -> Option<Self> {
        if !certificates::can_be_made() {
            return None;
        }
        let own = Self(tempfile::tempdir().unwrap());
        let at = own.0.path();
        authority(at, "root");
        authority_of(at, "middle", "root");
        signed(at, "leaf", "middle", "subjectAltName=IP:127.0.0.1");
        own.join("server.pem", &["leaf", "middle"]);
        std::fs::copy(own.path("leaf.key"), own.path("server.key")).unwrap();
        revoked(at, "roots", "root", &[]);
        revoked(at, "middles", "middle", &[]);
        Some(own)
    }

    fn at(&self) -> &Path {
        self.0.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// One file of several.
    fn join(&self, name: &str, parts: &[&str]) {
        let all: Vec<u8> =
            parts.iter().flat_map(|part| std::fs::read(self.path(&format!("{part}.pem"))).unwrap()).collect();
        std::fs::write(self.path(name), all).unwrap();
    }

    /// A gate before a server that is `root`'s, with these lists.
    fn before(&self, tls: &Tls, protocol: &str, lists: &[&str]) -> Plan {
        self.join("lists.pem", lists);
        let (ca, crl) = (self.path("root.pem"), self.path("lists.pem"));
        let settings = format!("protocol = \"{protocol}\", tls = {{ ca = {ca:?}, crl = {crl:?} }}");
        Gate::before_url(&tls.url()).upstream(&settings)
    }
}

#[track_caller]
fn refused(gate: &Gate, key: &str, why: &str) {
    let answer = gate.post("/charges", key, "{}");
    assert_eq!((answer.status, &*answer.word()), (502, "upstream-unreachable"), "{}", answer.show());
    assert_eq!(gate.states(key), [] as [&str; 0]);
    eventually(why, || gate.log().contains(why).then_some(()));
}

#[test]
fn an_upstream_whose_certificates_may_be_revoked_gets_nothing() {
    let Some(chain) = Chain::new() else { return };
    revoked(chain.at(), "leaf-gone", "middle", &["leaf"]);
    revoked(chain.at(), "middle-gone", "root", &["middle"]);
    authority(chain.at(), "stranger");
    revoked(chain.at(), "strange", "stranger", &["leaf"]);
    let (http1, h2) = (Upstream::start(|_| Reply::ok("paid")), Service::start(|_| (200, vec![], "paid", vec![])));
    let h2_only: &[&str] = &["h2"];
    for (protocol, address, protocols, only_tls12) in [
        ("auto", http1.address, &[][..], false),
        ("auto", http1.address, &[], true),
        ("auto", h2.address, h2_only, false),
        ("h2", h2.address, h2_only, true),
    ] {
        let terms = Terms { protocols, only_tls12, ..Terms::of(chain.at(), "server") };
        let tls = Tls::before(address, terms);
        for (lists, days, why) in [
            (&["roots", "leaf-gone"][..], 0, "Revoked"),
            (&["middle-gone", "middles"], 0, "Revoked"),
            // Of two lists of one authority the later counts.
            (&["roots", "middles", "leaf-gone"], 0, "Revoked"),
            (&["roots", "leaf-gone", "middles"], 0, "Revoked"),
            // Whose list is missing may have revoked it.
            (&["middles"], 0, "UnknownRevocationStatus"),
            (&["roots"], 0, "UnknownRevocationStatus"),
            (&["roots", "strange"], 0, "UnknownRevocationStatus"),
            // What is good for three days, by lists that are good for one.
            (&["roots", "middles"], 2, "revocation list expired"),
        ] {
            let plan = chain.before(&tls, protocol, lists);
            let gate = if days == 0 { plan } else { plan.clock_off_by(days * 86_400) }.start();
            refused(&gate, "k", why);
        }
        assert_eq!(tls.agreed(), 0);
        let gate = chain.before(&tls, protocol, &["roots", "middles", "strange"]).start();
        assert_eq!(gate.post("/charges", "k", "{}").text(), "paid");
        assert_eq!(tls.agreed(), 1);
    }
    assert_eq!((http1.runs(), h2.asked().len()), (2, 2));
}

#[test]
fn lists_that_change_are_taken_up_at_a_reload() {
    let Some(chain) = Chain::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let tls = Tls::before(upstream.address, Terms::of(chain.at(), "server"));
    let gate = chain.before(&tls, "auto", &["roots", "middles"]).start();
    assert_eq!(gate.post("/charges", "first", "{}").text(), "paid");
    revoked(chain.at(), "middles", "middle", &["leaf"]);
    chain.join("lists.pem", &["roots", "middles"]);
    gate.sighup();
    // Not by the connection that is open, either.
    let mut nth = 0;
    eventually("the new list", || {
        nth += 1;
        (gate.post("/charges", &format!("k{nth}"), "{}").word() == "upstream-unreachable").then_some(())
    });
    refused(&gate, "second", "Revoked");
    revoked(chain.at(), "middles", "middle", &[]);
    chain.join("lists.pem", &["roots", "middles"]);
    gate.sighup();
    eventually("the list after it", || (gate.post("/charges", "second", "{}").text() == "paid").then_some(()));
}

#[test]
fn each_connection_shows_its_certificates_where_lists_count() {
    let Some(chain) = Chain::new() else { return };
    let upstream = Upstream::start(|_| Reply::last("paid"));
    for only_tls12 in [false, true] {
        for has_lists in [false, true] {
            let tls = Tls::before(upstream.address, Terms { only_tls12, ..Terms::of(chain.at(), "server") });
            let plan = chain.before(&tls, "auto", &["roots", "middles"]);
            let plan =
                if has_lists { plan } else { plan.upstream(&format!("tls = {{ ca = {:?} }}", chain.path("root.pem"))) };
            let gate = plan.start();
            for nth in 0..6 {
                assert_eq!(gate.post("/charges", &format!("k{nth}"), "{}").text(), "paid");
            }
            assert_eq!((tls.agreed(), tls.resumed() > 0), (6, !has_lists));
        }
    }
}

#[test]
fn a_server_that_vouches_for_itself_is_on_nobodys_list() {
    let Some(chain) = Chain::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3"]);
    command.args([
        "-subj",
        "/CN=own",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        "own.key",
        "-out",
        "own.pem",
    ]);
    certificates::run(command.current_dir(chain.at()));
    let crl = chain.path("roots.pem");
    for (server, ca, expected) in [("own", "own.pem", "paid"), ("leaf", "leaf.pem", "")] {
        let tls = Tls::before(upstream.address, Terms::of(chain.at(), server));
        let ca = chain.path(ca);
        let gate = Gate::before_url(&tls.url()).upstream(&format!("tls = {{ ca = {ca:?}, crl = {crl:?} }}")).start();
        match expected {
            // Somebody else made it, and whether he has revoked it cannot be told.
            "" => refused(&gate, "k", "UnknownIssuer"),
            paid => assert_eq!(gate.post("/charges", "k", "{}").text(), paid),
        }
    }
}

/// What `oncegate check` says so many days from now.
fn check(plan: &Plan, days: i64) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.env("LD_PRELOAD", clock_shim()).env("CLOCK_OFFSET", (days * 86_400).to_string());
    let output = command.arg("check").arg("--config").arg(plan.config()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code(), said)
}

#[test]
fn lists_that_have_run_out_are_pointed_out() {
    let Some(chain) = Chain::new() else { return };
    let (ca, crl) = (chain.path("root.pem"), chain.path("roots.pem"));
    let (cert, key) = (chain.path("server.pem"), chain.path("server.key"));
    let lines = format!("tls = {{ cert = {cert:?}, key = {key:?}, client_ca = {ca:?}, client_crl = {crl:?} }}\n");
    let plan = Gate::before_url("https://127.0.0.1:1").upstream(&format!("tls = {{ ca = {ca:?}, crl = {crl:?} }}"));
    let plan = plan.server(&lines);
    for (days, times) in [(0, 0), (2, 2)] {
        let (status, said) = check(&plan, days);
        assert_eq!((status, said.matches("is past its next update").count()), (Some(0), times), "{said}");
    }
}

#[test]
fn a_file_that_holds_no_list_is_no_file_of_lists() {
    let Some(chain) = Chain::new() else { return };
    let whole = std::fs::read_to_string(chain.path("roots.pem")).unwrap();
    let broken = whole.replace("-----\nM", "-----\nA");
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    for (text, told) in [
        ("", "holds no list of revoked certificates"),
        (&*std::fs::read_to_string(chain.path("root.pem")).unwrap(), "holds no list of revoked certificates"),
        (&whole[..whole.len() - 40], "holds a list that cannot be read"),
        (&broken, "holds a list that cannot be read"),
    ] {
        std::fs::write(chain.path("lists"), text).unwrap();
        let (ca, crl) = (chain.path("root.pem"), chain.path("lists"));
        let upstream_tls =
            Gate::before_url("https://127.0.0.1:1").upstream(&format!("tls = {{ ca = {ca:?}, crl = {crl:?} }}"));
        let (cert, key) = (chain.path("server.pem"), chain.path("server.key"));
        let lines = format!("tls = {{ cert = {cert:?}, key = {key:?}, client_ca = {ca:?}, client_crl = {crl:?} }}\n");
        for (plan, named) in [(upstream_tls, "`crl`"), (Gate::before(&upstream).server(&lines), "`client_crl`")] {
            let output =
                Command::new(env!("CARGO_BIN_EXE_oncegate")).arg("check").arg("--config").arg(plan.config()).output();
            let output = output.unwrap();
            let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
            assert_eq!(output.status.code(), Some(78), "{said}");
            assert!(said.contains(named) && said.contains(told) && said.contains("hint:"), "{said}");
        }
    }
}

#[test]
fn a_client_whose_certificate_is_revoked_is_sent_away() {
    let Some(certificates) = Certificates::new() else { return };
    let at = certificates.directory();
    for name in ["ann", "bob"] {
        certificates.sign(name, "extendedKeyUsage=clientAuth");
    }
    revoked(at, "list", "ca", &["bob"]);
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let (ca, crl) = (certificates.path("ca.pem"), certificates.path("list.pem"));
    let lines = certificates.server(&format!(", client_ca = {ca:?}, client_crl = {crl:?}"));
    let gate = Gate::before(&upstream).server(&lines).start();
    let get = "GET / HTTP/1.1\r\nHost: gate.test\r\n\r\n";
    let is_let_in = |name: &str| {
        let mut client = Https::connect(gate.address, &certificates.client(&[], Some(name)));
        client.exchange(get, "made").is_ok()
    };
    assert!(is_let_in("ann") && !is_let_in("bob"));
    http2(gate.address, &certificates.client(&["h2"], Some("ann"))).post("/pay", "k", "10").expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
    // A new list is taken up as it comes, and one that is none changes nothing.
    revoked(at, "list", "ca", &["ann"]);
    eventually("the new list", || (is_let_in("bob") && !is_let_in("ann")).then_some(()));
    std::fs::write(&crl, "nothing").unwrap();
    eventually("a word of what is wrong", || gate.log().contains("new certificates cannot be used").then_some(()));
    assert!(is_let_in("bob") && !is_let_in("ann"));
}
