//! A link between a gate and its broker, which is lost as a test says.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

pub struct Link {
    pub port: u16,
    wires: Arc<Mutex<Vec<Arc<Wire>>>>,
}

/// One connection.
struct Wire {
    gate: TcpStream,
    broker: TcpStream,
    /// The gate's end is lost, and the broker does not know.
    is_half: AtomicBool,
}

impl Link {
    /// To what listens at this port.
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let link = Self { port: listener.local_addr().expect("it listens").port(), wires: Arc::default() };
        let wires = Arc::clone(&link.wires);
        spawn(move || {
            for gate in listener.incoming().map_while(Result::ok) {
                let broker = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
                let Ok(broker) = TcpStream::connect(broker) else { continue };
                let wire = Arc::new(Wire { gate, broker, is_half: AtomicBool::new(false) });
                wires.lock().unwrap().push(Arc::clone(&wire));
                let other = Arc::clone(&wire);
                spawn(move || wire.carry(&wire.gate, &wire.broker));
                spawn(move || other.carry(&other.broker, &other.gate));
            }
        });
        link
    }

    /// How many connections were ever made.
    pub fn connections(&self) -> usize {
        self.wires.lock().unwrap().len()
    }

    /// The gate loses its connections. The broker does not notice.
    pub fn lose_at_the_gate(&self) {
        for wire in self.wires.lock().unwrap().iter() {
            wire.is_half.store(true, Ordering::SeqCst);
            let _ = wire.gate.shutdown(Shutdown::Both);
        }
    }

    /// The broker notices what [`Self::lose_at_the_gate`] lost.
    pub fn lose_at_the_broker(&self) {
        for wire in self.wires.lock().unwrap().iter().filter(|wire| wire.is_half.load(Ordering::SeqCst)) {
            let _ = wire.broker.shutdown(Shutdown::Both);
        }
    }
}

impl Wire {
    fn carry(&self, mut from: &TcpStream, mut to: &TcpStream) {
        let _ = io::copy(&mut from, &mut to);
        if !self.is_half.load(Ordering::SeqCst) {
            let _ = (self.gate.shutdown(Shutdown::Both), self.broker.shutdown(Shutdown::Both));
        }
    }
}
