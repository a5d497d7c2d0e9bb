//! Messages that the client library would not send, byte for byte (AMQP 0-9-1, sections 4.2 and 2.2).

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};

use super::RabbitMq;
use crate::support::wait::PATIENCE;

/// A message as it is on the wire.
pub struct RawMessage<'a> {
    pub routing_key: &'a [u8],
    pub content_type: &'a [u8],
    pub message_id: Option<&'a [u8]>,
    /// Names and values of long strings.
    pub headers: &'a [(&'a [u8], &'a [u8])],
    pub body: &'a str,
}

struct RawConnection(TcpStream);

impl RabbitMq {
    /// Puts it into the queue; by another routing key than the queue's, over a binding to `amq.topic` that this makes.
    pub fn publish_raw(&self, message: &RawMessage<'_>) {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("RabbitMQ takes connections");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut wire = RawConnection(stream);
        wire.0.write_all(b"AMQP\0\0\x09\x01").expect("it reads");
        wire.expect([10, 10]);
        let login = [&long(b"")[..], &short(b"PLAIN"), &long(b"\0guest\0guest"), &short(b"en_US")].concat();
        wire.call(0, [10, 11], &login);
        let tune = wire.expect([10, 30]);
        wire.call(0, [10, 31], &[&tune[..6], &[0, 0]].concat());
        wire.call(0, [10, 40], b"\x01/\0\0");
        wire.expect([10, 41]);
        wire.call(1, [20, 10], b"\0");
        wire.expect([20, 11]);
        let queue = short(self.queue.as_bytes());
        // A binding is text.
        let binding = if std::str::from_utf8(message.routing_key).is_ok() { message.routing_key } else { b"#" };
        wire.call(
            1,
            [50, 20],
            &[b"\0\0", &queue[..], &short(b"amq.topic"), &short(binding), &[0], &long(b"")].concat(),
        );
        wire.expect([50, 21]);
        wire.call(1, [60, 40], &[b"\0\0", &short(b"amq.topic")[..], &short(message.routing_key), &[0]].concat());
        let entry = |(name, value): &(&[u8], &[u8])| [&short(name)[..], b"S", &long(value)].concat();
        let table: Vec<u8> = message.headers.iter().flat_map(entry).collect();
        let id = message.message_id.map(short).unwrap_or_default();
        let flags = [0b1010_0000, if message.message_id.is_some() { 0b1000_0000 } else { 0 }];
        let size = (message.body.len() as u64).to_be_bytes();
        let properties = [&short(message.content_type)[..], &long(&table), &id].concat();
        wire.send(2, 1, &[&[0, 60, 0, 0][..], &size, &flags, &properties].concat());
        wire.send(3, 1, message.body.as_bytes());
        // It has taken the message by then.
        wire.call(1, [20, 40], b"\0\xc8\0\0\0\0\0");
        wire.expect([20, 41]);
    }
}

impl RawConnection {
    fn send(&mut self, kind: u8, channel: u8, payload: &[u8]) {
        let size = (payload.len() as u32).to_be_bytes();
        self.0.write_all(&[&[kind, 0, channel][..], &size, payload, &[0xCE]].concat()).expect("it reads");
    }

    fn call(&mut self, channel: u8, [class, method]: [u8; 2], arguments: &[u8]) {
        self.send(1, channel, &[&[0, class, 0, method][..], arguments].concat());
    }

    /// The arguments of the method that comes next.
    fn expect(&mut self, [class, method]: [u8; 2]) -> Vec<u8> {
        let mut head = [0; 7];
        self.0.read_exact(&mut head).expect("a frame");
        let size = u32::from_be_bytes(head[3..].try_into().expect("four bytes")) as usize;
        let mut payload = vec![0; size + 1];
        self.0.read_exact(&mut payload).expect("a frame");
        assert_eq!((head[0], &payload[..4]), (1, &[0, class, 0, method][..]), "{payload:?}");
        payload[4..size].to_vec()
    }
}

fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8][..], text].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}
