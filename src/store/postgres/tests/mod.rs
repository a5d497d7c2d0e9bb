//! Against a real server.

use super::*;
use crate::store::contract;

#[tokio::test]
async fn contract_quick() {
    let url = std::env::var("PGURL").unwrap();
    let number = std::sync::atomic::AtomicU64::new(0);
    contract::run(|| async {
        let n = number.fetch_add(1, Ordering::Relaxed);
        let admin: tokio_postgres::Config = url.parse().unwrap();
        let (client, conn) = admin.connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(conn);
        client.batch_execute(&format!("DROP DATABASE IF EXISTS t{n} WITH (FORCE)")).await.unwrap();
        client.batch_execute(&format!("CREATE DATABASE t{n}")).await.unwrap();
        let mut servers = admin.clone();
        servers.dbname(format!("t{n}"));
        let settings = Settings { servers, tls: None, connections: 8 };
        migrate(&settings).await.unwrap();
        contract::Harness::waiting(Postgres::open(&settings).await.unwrap()).shared()
    })
    .await;
}
