// Reads requests as Node's server does, whose parser is llhttp: node llhttp.js CASES PROBE, where each line of CASES
// is a JSON object with `bytes` in base64. Says for each, as a line of JSON, what was read, and what could not be.
'use strict'
const fs = require('fs')
const http = require('http')
const net = require('net')

const [cases, probe] = [fs.readFileSync(process.argv[2], 'latin1').trim().split('\n'), process.argv[3]]
const behind = Buffer.from(`GET ${probe} HTTP/1.1\r\nHost: probe\r\n\r\n`)
let reading

const server = http.createServer({ maxHeaderSize: 1 << 20, insecureHTTPParser: false }, (request, response) => {
  const chunks = []
  request.on('data', (chunk) => chunks.push(chunk))
  request.on('end', () => {
    keep(request, Buffer.concat(chunks))
    response.setHeader('Content-Length', 0)
    response.end()
    if (request.url === probe) request.socket.reading.done()
  })
})
server.maxHeadersCount = 0
server.on('connection', (socket) => { socket.reading = reading })
// What stands behind a request to upgrade is not parsed any more.
server.on('upgrade', (request, socket, rest) => {
  keep(request, Buffer.alloc(0))
  if (rest.equals(behind)) keep({ method: 'GET', url: probe, rawHeaders: [], rawTrailers: [], socket }, Buffer.alloc(0))
  socket.reading.done()
})
server.on('clientError', (error, socket) => {
  socket.reading.error = error.code
  socket.destroy()
  socket.reading.done()
})

function keep (request, body) {
  request.socket.reading.requests.push({
    method: request.method,
    target: request.url,
    fields: request.rawHeaders,
    body: body.toString('base64'),
    trailers: request.rawTrailers
  })
}

function read (line) {
  return new Promise((resolve) => {
    const bytes = Buffer.from(JSON.parse(line).bytes, 'base64')
    const client = net.connect(server.address().port, '127.0.0.1')
    const own = {
      requests: [],
      error: null,
      done () {
        clearTimeout(giveUp)
        client.destroy()
        resolve({ requests: own.requests, error: own.error })
      }
    }
    const giveUp = setTimeout(() => { own.error = 'stuck'; own.done() }, 5000)
    reading = own
    client.on('error', () => {})
    client.resume()
    client.write(Buffer.concat([bytes, behind]))
  })
}

server.listen(0, '127.0.0.1', async () => {
  console.log(JSON.stringify({ llhttp: process.versions.llhttp, methods: http.METHODS }))
  for (const line of cases) console.log(JSON.stringify(await read(line)))
  // What is still on its way to a reader who is slower would be lost.
  process.stdout.write('', () => process.exit(0))
})
